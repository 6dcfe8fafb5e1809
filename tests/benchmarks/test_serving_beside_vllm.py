"""Serving is measured beside vLLM's server, with a stand-in for both; and the client is tried on samebit's own."""

import json
import math
import socket
import struct
import sys
from pathlib import Path

import pytest

from samebit.benchmarks import serving
from samebit.benchmarks.engines import commands, http_servers
from samebit.benchmarks.engines.process import Command
from samebit.benchmarks.workloads import models

from ..rollout.http import served
from .test_beside_vllm import TINY

STAND_IN = Path(__file__).with_name("stand_in_server.py")
PROMPTS = [[1, 2, 3], [4, 5, 6]]
IP_LOCAL_PORT_RANGE = 51


def stand_in(port: int, fault: str = "none") -> Command:
    return Command(Path(sys.executable), (str(STAND_IN), str(port), fault))


def started(model: commands.Model, port: int, serving: commands.Serving) -> Command:
    return stand_in(port)


def run(monkeypatch: pytest.MonkeyPatch, *line: str) -> None:
    monkeypatch.setitem(models.SHAPES, "5m", TINY)
    monkeypatch.setattr(sys, "argv", ["serving.py", "--parts", "vllm", "--quick", *line])
    serving.main()


def test_both_servers_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "samebit_server", started)
    monkeypatch.setattr(commands.Vllm, "server", lambda self, model, port, serving: stand_in(port))
    target = tmp_path / "out.json"
    run(monkeypatch, "--vllm-python", sys.executable, "--json", str(target))
    metrics = {name: one["value"] for name, one in json.loads(target.read_text())["metrics"].items()}
    names = {f"ratio_vs_vllm_{what}" for what in ("whole", "streamed", "first_chunk")}
    for server in ("samebit", "vllm"):
        names |= {f"tokens_per_second_{way}_{server}" for way in ("whole", "streamed")}
        names |= {f"first_chunk_seconds_{server}", f"crowd_tokens_per_second_{server}"}
        assert [metrics.pop(f"crowd_{what}_{server}") for what in ("lost", "doubled", "hung")] == [0, 0, 0]
    assert set(metrics) == names
    assert all(0 < value < math.inf for value in metrics.values())


def test_without_vllm_its_part_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--vllm-python", str(tmp_path / "python"))
    assert capsys.readouterr().out.startswith(f"left out: no vLLM at {tmp_path / 'python'}: `make bench-vllm`")


@pytest.mark.parametrize(("fault", "what"), [("loses", "lost"), ("doubles", "doubled"), ("breaks", "lost")])
def test_a_fault_of_a_server_is_counted_in_a_crowd_and_refused_in_a_batch(fault: str, what: str) -> None:
    sizes = serving.Sizes(requests=2, prompt=4, tokens=3, crowd=5, crowd_tokens=3)
    with http_servers.serving(lambda port: stand_in(port, fault), "any") as server:
        counts = serving.crowd(server, sizes)
        streamed = server.ask(PROMPTS, 3, stream=True)
    assert counts.pop("tokens_per_second") > 0
    assert counts == {"hung": 0, "lost": 0, "doubled": 0} | {what: 5}
    with pytest.raises(RuntimeError, match="asked for 3"):
        streamed.check(3)


def test_a_stream_that_does_not_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_servers.serving(lambda port: stand_in(port, "hangs"), "any") as server:
        monkeypatch.setattr(http_servers, "HANGS", 0.1)
        answers = server.ask(PROMPTS, 3, stream=True)
    assert [one.hung for one in answers.each] == [True, True]


def test_a_server_that_does_not_start_is_named() -> None:
    with (
        pytest.raises(RuntimeError, match="end of its output:\na fault of the server"),
        http_servers.serving(lambda port: stand_in(port, "dies"), "any"),
    ):
        pass


@pytest.mark.parametrize("reuse", [0, 1])
def test_a_reserved_port_is_for_the_server_that_is_told_it(reuse: int) -> None:
    """Nobody who asks for any port gets the reserved one, but the server that is told it does."""
    with http_servers.reserved_port() as port:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            try:
                other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port))
            except OSError as error:
                pytest.skip(f"Linux has this since 6.3: {error}")
            with pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", 0))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_samebits_own_server_answers_the_client(tmp_path: Path) -> None:
    with served.serving(served.build_folder(tmp_path)) as one:
        server = http_servers.CompletionServer(one.base, served.NAME)
        for stream in (False, True):
            answers = server.ask(PROMPTS, 5, stream=stream)
            answers.check(5)
            assert 0 < answers.first_chunk() <= answers.seconds


def test_both_servers_get_the_same_limits(tmp_path: Path) -> None:
    model, settings = commands.Model(tmp_path, "float32", 512), commands.Serving("measured", 64, 0.25, "auto")
    for command in (commands.samebit_server(model, 9, settings), commands.Vllm().server(model, 9, settings)):
        line = command.line()
        flags = ("--dtype", "--max-num-seqs", "--max-model-len", "--port", "--served-model-name")
        assert [line[line.index(flag) + 1] for flag in flags] == ["float32", "64", "512", "9", "measured"]
