"""The engines run in processes of their own, and their figures are right, with a stand-in for vLLM."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from samebit.benchmarks import beside_vllm, mismatch
from samebit.benchmarks.engines import commands, huggingface_engine, samebit_engine
from samebit.benchmarks.engines.messages import Done, Engine, Job
from samebit.benchmarks.engines.process import Command, started
from samebit.benchmarks.rounds import mismatch_report
from samebit.benchmarks.rounds.parts_file import PartsFile
from samebit.benchmarks.rounds.turns import Spread
from samebit.benchmarks.workloads import mismatch_models, models, served, trainers

from ..forks import python
from .stand_in_engine import StandIn as StandInEngine

STAND_IN = Path(__file__).with_name("stand_in_engine.py")
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
JOB = Job([[1, 2, 3], [4, 5, 6]], samples=2, new_tokens=3)


def stand_in(fault: str = "none") -> Command:
    return Command(Path(sys.executable), (str(STAND_IN), fault))


class StandIn(commands.Vllm):
    def command(self, model: commands.Model, step_tokens: int | None = None, kv_gb: float = 2.0) -> Command:
        return stand_in()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> commands.Model:
    folder = tmp_path_factory.mktemp("model")
    models.build(TINY, torch.float32, 64).save_pretrained(folder)
    return commands.Model(folder, "float32", 64)


def test_an_engine_answers_each_job_and_what_it_prints_is_no_answer() -> None:
    with started(stand_in()) as engine:
        assert engine.versions == {"stand-in": "1"}
        first, again = engine.run(JOB), engine.run(JOB)
        fresh = engine.run(Job(JOB.prompts, new_tokens=1, logprobs=False, fresh=True))
        assert engine.cpu_seconds() > 0
    assert [len(tokens) for tokens in first.tokens] == [3] * 4
    assert first.logprobs == [[-1.0] * 3] * 4
    assert (first.cached, again.cached, fresh.cached) == (0, 6, 0)
    assert fresh.logprobs is None
    assert engine.cpu_seconds() == 0  # nothing of it runs any more


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "ended with 1; the end of its stderr:\n(.|\n)*a fault of the engine"),
        ("short", r"gave 4 sequences of \[2\] tokens, asked for 4 of 3"),
        ("silent", r"gave 0 sequences of \[\] log-probabilities, asked for 4 of 3"),
    ],
)
def test_a_fault_of_an_engine_is_named(fault: str, message: str) -> None:
    with started(stand_in(fault)) as engine, pytest.raises(RuntimeError, match=message):
        engine.run(JOB)


def test_an_engine_that_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No such file or directory"):
        started(Command(Path(sys.executable), (str(tmp_path / "none.py"),))).__enter__()
    with pytest.raises(FileNotFoundError, match="`make bench-vllm` sets its environment up"):
        commands.Vllm(tmp_path / "python").check()


def test_every_part_is_measured_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(models.SHAPES, "5m", TINY)
    monkeypatch.setattr(commands.Vllm, "command", StandIn.command)
    for own in ("samebit", "hugging_face"):
        monkeypatch.setattr(commands, own, lambda model: stand_in())
    monkeypatch.setattr(beside_vllm, "_quick", small)
    target = tmp_path / "out.json"
    parts = ["5m_fp32_groups", "5m_fp32_shared", "5m_fp32_turns"]
    line = ["--quick", "--rounds", "1", "--vllm", sys.executable, "--json", str(target), "--parts"]
    for names in (parts[:1], parts):
        monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *line, *names])
        beside_vllm.main()
    content = json.loads(target.read_text())
    assert list(content["meta"]["parts"]) == parts
    names = {f"ratio_vs_{peer}_{part}" for peer in ("vllm", "vllm_logprobs") for part in parts}
    assert names | {"ratio_vs_hf_generate_5m_fp32_groups"} <= set(content["metrics"])
    assert all(0 < value["value"] < math.inf for value in content["metrics"].values())
    speed = content["metrics"]["tokens_per_second_vllm_5m_fp32_groups"]["value"]
    assert speed == small(97).output_tokens("groups") / 0.25


def small(vocab_size: int) -> served.Sizes:
    return served.Sizes(
        vocab_size, prompts=2, samples=2, prompt_tokens=9, new_tokens=4, requests=3, shared=20, own=3,
        conversations=2, turns=2, turn_input=5, turn_output=4,
    )  # fmt: skip


def test_what_is_done_is_spared(tmp_path: Path) -> None:
    path = tmp_path / "parts.json"
    PartsFile(path).add("a", {"rounds": 1}, {"x_a": Spread(2.0, 1.0, 3.0)})
    again = PartsFile(path)
    assert again.missing(["b", "a"]) == ["b"]
    again.add("b", {}, {"x_b": Spread(1.0, 1.0, 1.0)})
    assert PartsFile(path).metrics == {"x_a": Spread(2.0, 1.0, 3.0), "x_b": Spread(1.0, 1.0, 1.0)}
    assert PartsFile(None).missing(["a"]) == ["a"]


class InProcess:
    """Asks an engine of this process instead, which loads torch once for all tests."""

    versions = {"in": "process"}  # noqa: RUF012

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, job: Job) -> Done:
        if job.fresh:
            self._engine.forget()
        return self._engine.run(job)


@contextmanager
def opened(command: Command) -> Iterator[InProcess]:
    engines = {
        "samebit_engine": samebit_engine.opened,
        "huggingface_engine": huggingface_engine.opened,
    }
    if command.args[0] == str(STAND_IN):
        yield InProcess(StandInEngine("none"))
        return
    with engines[command.args[1].rpartition(".")[2]](command.args[2:]) as engine:
        yield InProcess(engine)


def test_mismatch_is_counted_and_samebits_is_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mismatch is counted, here everywhere of the stand-in, which reports -1; samebit's is zero. Hugging Face computes
    too.
    """
    shape = (mismatch_models.CONFIGS["dense"][0], TINY | {"tie_word_embeddings": False})
    monkeypatch.setitem(mismatch_models.CONFIGS, "dense", shape)
    monkeypatch.setattr(mismatch, "started", opened)
    monkeypatch.setattr(mismatch, "Sizes", lambda **_: SMALL)
    monkeypatch.setattr(commands.Vllm, "command", StandIn.command)
    outputs = {kind: tmp_path / f"out.{kind}" for kind in ("json", "png", "md")}
    line = ["--quick", "--parts", "dense_bf16", "--vllm", sys.executable, "--json", str(outputs["json"])]
    drawn = ["--plot", str(outputs["png"]), "--markdown", str(outputs["md"])]
    monkeypatch.setattr(sys, "argv", ["mismatch.py", *line, *drawn])
    mismatch.main()
    report = mismatch_report.rows(PartsFile(outputs["json"]).metrics)
    by_way = {(row.way, row.trainer): row for row in report}
    for way in ("cold", "warm", "batch_1", "chunked"):
        assert by_way[f"vllm_{way}", "bf16"].differ == by_way[f"vllm_{way}", "fp32"].differ == 20
        ours = by_way[f"samebit_{way}", "bf16"]
        assert (ours.tokens, ours.differ, ours.mean, ours.largest, ours.k3) == (20, 0, 0, 0, 0)
    for way in ("hf_batch", "hf_forward", "samebit_cold", "samebit_warm", "samebit_batch_1", "samebit_chunked"):
        rounded = by_way[way, "fp32"]  # what bfloat16 costs anyone
        assert 0 < rounded.mean <= rounded.largest < 1
        assert rounded.k3 > 0
    if find_spec("trl"):
        assert by_way["trl_vllm", "bf16"].differ == 20
        assert by_way["trl", "bf16"].largest < 0.1
    assert outputs["png"].read_bytes().startswith(b"\x89PNG")
    assert len(outputs["md"].read_text().splitlines()) == 2 + len(report)


SMALL = mismatch.Sizes(sequences=4, prompt=40, new=5, micro_batch=2, chunk=16)


def test_a_difference_is_the_trainers_less_the_engines() -> None:
    ids = torch.tensor([[1, 2, 3]])
    reported = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    found = mismatch.compare(mismatch.Sampled(ids, reported), lambda ids: torch.tensor([[-1.0, -1.5]]))
    assert (found["tokens"], found["differ"], found["mean"], found["largest"]) == (2, 1, 0.25, 0.5)
    assert found["k3"] == pytest.approx((math.exp(0.5) - 1.5) / 2)


def test_trl_rounds_logits_to_bfloat16_and_not_what_it_makes_of_them(model: commands.Model) -> None:
    pytest.importorskip("trl")
    ids = torch.arange(40).reshape(4, 10)
    trained = trainers.load(model.folder, torch.bfloat16)
    scores, expected = trainers.trl(trained, 2)(ids), trainers.hugging_face(trained, 2)(ids)
    assert scores.dtype is torch.float32
    assert bool((scores != scores.bfloat16()).any())
    torch.testing.assert_close(scores, expected, rtol=0, atol=0.02)


def test_hugging_faces_engine_reports_what_its_forward_computes(model: commands.Model) -> None:
    with opened(commands.hugging_face(model)) as engine:
        done = engine.run(Job([[5, 6, 7], [8, 9, 10]], samples=2, new_tokens=4, one_by_one=True))
    hf = AutoModelForCausalLM.from_pretrained(model.folder).eval()
    ids = torch.tensor([[*prompt, *tokens] for prompt, tokens in zip([[5, 6, 7]] * 2, done.tokens[:2], strict=True)])
    with torch.no_grad():
        expected = hf(ids).logits[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]
    torch.testing.assert_close(torch.tensor((done.logprobs or [])[:2]), expected, rtol=1e-4, atol=1e-4)


def test_vllm_is_found_by_a_path_from_the_folder_of_the_call(
    monkeypatch: pytest.MonkeyPatch, model: commands.Model
) -> None:
    """A path to vLLM is read from the folder of the call, as `make bench-vllm` gives it; an engine's own folder is
    another.
    """
    folder, name = Path(sys.executable).parts[-2:]
    monkeypatch.chdir(Path(sys.executable).parents[1])
    command = replace(commands.Vllm(Path(folder, name)).command(model), args=(str(STAND_IN), "none"))
    with started(command) as engine:
        assert engine is not None


@pytest.mark.parametrize("allocator", ["tcmalloc_minimal", "tcmalloc", None])
def test_vllm_gets_the_libraries_that_it_asks_for(
    tmp_path: Path, model: commands.Model, allocator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "find_library", lambda name: f"lib{name}.so.4" if name == allocator else None)
    python = tmp_path / "bin" / "python"
    for path in (python, tmp_path / "lib" / "libiomp5.so"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    bound = commands.Vllm(python).command(model, step_tokens=96)
    openmp = str(tmp_path / "lib" / "libiomp5.so")
    assert bound.environment["LD_PRELOAD"] == (f"{openmp}:lib{allocator}.so.4" if allocator else openmp)
    assert bound.environment["VLLM_CPU_OMP_THREADS_BIND"]
    assert "OMP_NUM_THREADS" not in bound.variables()
    assert bound.args[-4:] == ("--step-tokens", "96", "--kv-gb", "2.0")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in commands.Vllm(python, "auto").command(model).environment


@pytest.mark.soak
def test_samebits_engine_in_a_process_of_its_own(model: commands.Model) -> None:
    command = commands.samebit(model)
    with started(replace(command, args=(*python()[1:], *command.args))) as engine:
        assert set(engine.versions) == {"torch", "transformers", "numba"}
        cold, warm = engine.run(Job([list(range(40))], new_tokens=3, fresh=True)), engine.run(Job([list(range(40))]))
    assert (cold.cached, warm.cached) == (0, 32)
