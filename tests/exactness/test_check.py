"""`samebit check` prints what it should, exits as it should, and can find a difference."""

import gc
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from samebit.kernels import bind
from samebit.kernels.binding.binding import is_bound
from samebit.kernels.binding.experts.routes import RoutePages
from samebit.kernels.binding.trainer import logprob_head as scored_head
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams, cli
from samebit.rollout.adapters import loading
from samebit.rollout.audit import audit as check
from samebit.rollout.audit import weight_updates
from samebit.rollout.audit.compare import Row
from samebit.rollout.audit.prefix_cache import CacheCheck, CacheRuns
from samebit.rollout.audit.weight_updates import WeightsCheck
from samebit.rollout.cache import PrefixCache
from samebit.rollout.cache.prefix_tree import PrefixTree
from samebit.rollout.drafts.drafter import Drafter
from samebit.rollout.engine.engine import Engine
from samebit.weight_sync import SharedMemorySender, SyncReport
from samebit.weight_sync.wire.buckets import Kind
from samebit.weight_sync.wire.delta import DeltaEncoder, Encoded

from .. import forks
from .families import CAMPAIGN, DTYPES, EXPERTS, FAMILIES, HYBRIDS, SPARSE, make_model
from .lora import make_peft


@pytest.fixture
def no_weights_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the rows of weights out, in tests that are about other rows."""
    leave_out(monkeypatch, "weights")


def leave_out(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """Let a check have no rows of these parts."""
    for part in parts:
        monkeypatch.setattr(check._Check, part, lambda self: iter(()))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    make_model("Gemma3", torch.bfloat16).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def processes_are_forks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the processes that the command starts be forks."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(forks.python())} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))


def test_json_is_one_object_and_nothing_else(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The output of --json is one object and nothing else. Under `make soak` with as many sleeps and steps as users
    get; otherwise few, in which each order is.
    """
    if not CAMPAIGN:
        request.getfixturevalue("processes_are_forks")
    cycles, steps = (weight_updates.CYCLES, weight_updates.STEPS) if CAMPAIGN else (4, 12)
    monkeypatch.setattr(weight_updates, "CYCLES", cycles)
    monkeypatch.setattr(weight_updates, "STEPS", steps)
    assert cli.main(["check", folder, "--json", "--tokens", "26", "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [row["name"] for row in report["rows"]]
    assert len(set(names)) == len(names) >= 38
    weights = [name for name in names if name.startswith(("weights", "slept", "delta"))]
    assert len(weights) == 12
    guessed = [re.findall(r"\d+", name) for name in names if name.startswith("tokens guessed ahead")]
    assert [0 < int(right) < int(made) for right, made in guessed] == [True, True]
    assert f"slept and woken {cycles} times" in weights
    assert f"delta against dense, {steps} optimizer steps" in weights
    first, *others = report["rows"]
    assert first["name"] == "beside transformers' own forward"
    assert first["promised"] is False
    assert 0 < first["max_abs_diff"] < 1e-4
    for row in others:
        assert row.keys() == {"name", "tokens", "differing", "max_abs_diff"}
        assert row["tokens"] > 50
        assert row["differing"] == row["max_abs_diff"] == 0


@pytest.mark.usefixtures("no_weights_part")
def test_a_table_for_people(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    leave_out(monkeypatch, "temperatures", "prefix_cache", "layouts")
    assert cli.main(["check", folder, "--tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "every bit agrees"
    assert any(line.startswith("preempted") for line in lines)


def test_rows_that_were_found_before_an_error_are_kept(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object) -> Iterator[Row]:
        raise ValueError("no weights today")

    leave_out(monkeypatch, "temperatures", "prefix_cache", "layouts")
    monkeypatch.setattr(check._Check, "weights", broken)
    assert cli.main(["check", folder, "--json", "--tokens", "4"]) == 2
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["ok"] is False
    assert report["error"] == "ValueError: no weights today"
    assert "one request at a time" in [row["name"] for row in report["rows"]]
    assert printed.err.endswith("samebit check: no weights today\n")


@pytest.mark.usefixtures("no_weights_part")
def test_another_formula_in_the_trainer_is_found(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def torchs_own(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = (logits / temperature[:, None]).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return found, torch.zeros_like(found), torch.zeros_like(found)

    monkeypatch.setattr(scored_head, "gather", torchs_own)
    leave_out(monkeypatch, "temperatures", "prefix_cache")
    assert cli.main(["check", folder, "--json", "--tokens", "4"]) == 1
    report = json.loads(capsys.readouterr().out)
    differing = {row["name"]: row["differing"] for row in report["rows"]}
    assert report["ok"] is False
    assert differing["trainer: left padded"] > 0
    assert differing["same seed, same samples under all of these"] == 0


def test_a_module_that_is_bound_to_another_function_is_far_from_transformers(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is bound to another function is far from transformers in one row: all other rows compare samebit
    with itself, so none of them can see it.
    """

    def bound_wrongly(module: Any) -> Any:
        module.config.final_logit_softcapping = 1.0
        return bind(module)

    leave_out(monkeypatch, "schedules", "temperatures", "prefix_cache", "layouts", "weights")
    [right] = [row for row in check.check_model(folder, new_tokens=4) if not row.promised]
    monkeypatch.setattr(check, "bind", bound_wrongly)
    wrong, *others = check.check_model(folder, new_tokens=4)
    assert right.max_abs_diff < 0.1 < wrong.max_abs_diff
    assert [row for row in others if row.differing] == []


@pytest.mark.usefixtures("no_weights_part")
def test_another_sample_of_the_same_seed_is_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "temperatures", "prefix_cache", "layouts")
    monkeypatch.setattr(check._Check, "_one_by_one", lambda self: self._run(self.workload.params(temperature=0.5)))
    differing = {row.name: row.differing for row in check.check_model(folder, new_tokens=4)}
    assert differing["same seed, same samples under all of these"] > 0
    assert differing["one request at a time"] > 0


EVERY = [(name, dtype) for name in (*FAMILIES, *SPARSE, *HYBRIDS) for dtype in DTYPES]
FEW = [("Mamba2", torch.float32)]
"""Lists the one family of `make test`: `test_another_grid_of_states` has the rows of attention beside states, and of
experts.
"""


@pytest.mark.soak
@pytest.mark.parametrize(("name", "dtype"), EVERY if CAMPAIGN else FEW)
def test_every_family_passes(name: str, dtype: torch.dtype, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every family passes all rows under `make soak`; otherwise one does, without the rows that change weights."""
    if not CAMPAIGN:
        request.getfixturevalue("no_weights_part")
    model = make_model(name, dtype)
    if "chunk_size" in vars(model.config):  # transformers' own path is wrong beyond one: docs/exactness.md
        model.config.chunk_size = max(check.UNBOUND_LENGTHS)
    model.save_pretrained(tmp_path)
    has_experts = name in EXPERTS or any(".experts." in key for key in model.state_dict())
    rows = list(check.check_model(tmp_path, new_tokens=16 if CAMPAIGN else 8))
    assert len(rows) >= (39 if CAMPAIGN else 26)
    assert [row.name for row in rows if row.promised and (row.differing or not row.tokens)] == []
    [unbound] = [row for row in rows if not row.promised]
    assert unbound.max_abs_diff < (1e-3 if dtype == torch.float32 else 0.5)
    assert unbound.tokens or has_experts, unbound.name  # torch's grouped product refuses some sizes
    assert sum(row.name.startswith("states: ") for row in rows) == (2 if name in HYBRIDS else 0)
    assert sum(row.name.startswith("routing: ") for row in rows) == has_experts


def test_the_row_beside_transformers_caps_what_the_model_caps(tmp_path: Path) -> None:
    """The row beside transformers caps scores where the model does: SDPA, which transformers takes for a loaded model,
    leaves out the cap of Gemma-2.
    """
    make_model("Gemma2").save_pretrained(tmp_path)
    row = next(iter(check.check_model(tmp_path)))
    assert row.tokens
    assert row.max_abs_diff < 1e-3


@pytest.mark.usefixtures("no_weights_part")
def test_the_adapter_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter's folder is checked: that merged weights differ is told and no failure; another scale in a worker is
    one.
    """
    model = make_peft("Qwen3")
    make_model("Qwen3", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    leave_out(monkeypatch, "prefix_cache", "temperatures", "layouts")
    monkeypatch.setattr(check._Check, "schedules", _one_schedule)
    unbound: list[bool] = []
    scored = check.of_transformers
    monkeypatch.setattr(
        check, "of_transformers", lambda *given: unbound.append(not is_bound(given[0])) or scored(*given)
    )
    arguments = ["check", str(tmp_path / "adapter"), "--json", "--tokens", "6"]
    assert cli.main(arguments) == 0
    assert unbound == [True]
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    merged = rows["adapter: merged, which is another policy"]
    assert merged["promised"] is False
    assert merged["differing"] > 0
    made = loading.new_delta
    monkeypatch.setattr(
        loading, "new_delta", lambda shape, *rest: made(replace(shape, scale=1.01 * shape.scale), *rest)
    )
    assert cli.main(arguments) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [name for name, row in rows.items() if row["differing"]][1:] == [
        "adapter: loaded by name, beside the model alone",
        merged["name"],
    ]


def _one_schedule(self: Any) -> Iterator[Row]:
    self.first = self._run()
    yield self._row("many requests at once, whole prefill", self.first)


@pytest.mark.usefixtures("no_weights_part")
def test_another_expert_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("Qwen3Moe", torch.bfloat16).save_pretrained(tmp_path)
    leave_out(monkeypatch, "schedules", "temperatures", "prefix_cache", "layouts")
    note = RoutePages.note
    monkeypatch.setattr(RoutePages, "note", lambda self, layer, ids: note(self, layer, ids + (layer == 1)))
    (row,) = [row for row in check.check_model(tmp_path, new_tokens=4) if row.differing]
    assert row.name == "routing: pairs that differ, cold and warm"
    assert 0 < row.differing < row.tokens / 2


@pytest.mark.usefixtures("no_weights_part")
def test_another_grid_of_states(tmp_path: Path) -> None:
    make_model("GraniteMoeHybrid, experts", torch.bfloat16).save_pretrained(tmp_path)
    rows = list(check.check_model(tmp_path, new_tokens=8, ssm_chunk=16))
    assert [row.name for row in rows if row.promised and (row.differing or not row.tokens)] == []
    names = [row.name for row in rows]
    assert "states: hits on and off the grids" in names
    assert "routing: pairs that differ, cold and warm" in names


@pytest.mark.parametrize(
    ("owner", "name", "instead", "missing"),
    [
        (PrefixCache, "find_awaited", lambda self, sequence: None, "no prefix_hits and leader_waits"),
        (PrefixTree, "extend_match", lambda self, match, chain, tokens: None, "no prefix_hits"),
    ],
)
def test_a_row_that_would_show_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Any, missing: str
) -> None:
    runs = CacheRuns(bind(make_model("Qwen3", torch.float32)), 300, 300, new_tokens=8)
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(ValueError, match=missing):
        list(CacheCheck(runs).runs())


@pytest.mark.usefixtures("no_weights_part")
def test_a_row_of_guesses_of_which_none_is_right_is_an_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafter, "guesses", lambda self, sequences, room: [() for _ in sequences])
    with pytest.raises(ValueError, match="none of 0 guesses was right: ask for more --tokens"):
        list(check.check_model(folder, new_tokens=4))


@pytest.mark.parametrize("tokens", ["161", "100000"])
def test_more_tokens_than_the_model_has_room_for_are_refused(
    folder: str, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", folder, "--json", "--tokens", tokens]) == 2
    printed = capsys.readouterr()
    assert f"{tokens} new tokens a request were asked for (--tokens); allowed: 1 to 160, half of this" in printed.err
    assert printed.out == ""


def test_the_tokens_that_are_asked_for_are_sampled(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(check._Check, "schedules", lambda self: seen.append(self.workload.new_tokens) or iter(()))
    leave_out(monkeypatch, "temperatures", "prefix_cache", "layouts", "weights")
    monkeypatch.setattr(check, "check_gemm_rows", lambda model: (1, 0, 0.0))
    for tokens in (160, 33, 1, None):
        assert len(list(check.check_model(folder, new_tokens=tokens))) == 3
    assert seen == [160, 33, 1, 32]
    assert check._new_tokens(None, 40) == 20, "a short model gets fewer, of what nobody asked for"


def test_a_chunk_for_a_model_without_states_is_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", folder, "--ssm-chunk", "128"]) == 2
    assert "ssm_chunk=128, but this model has no recurrent layers" in capsys.readouterr().err


def test_a_delta_that_saves_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it(self: DeltaEncoder, new: Any, base: Any, element: int) -> Encoded:
        base[:] = new
        return Encoded(Kind.DENSE, (new,))

    model = bind(make_model("Qwen3", torch.bfloat16))
    params = SamplingParams(max_tokens=2, seed=1)
    weights = WeightsCheck(model, ([[1, 2, 3]], [params]), [], 32)
    monkeypatch.setattr("samebit.rollout.audit.weight_updates.STEPS", 3)
    with RolloutWorker(make_model("Qwen3", torch.bfloat16), config=RolloutConfig(max_model_len=32)) as worker:
        run = weights._deltas(worker)
        assert (run.name, run.beside) == ("delta against dense, 3 optimizer steps", (6, 0, 0.0))
        monkeypatch.setattr(DeltaEncoder, "encode", all_of_it)
        with pytest.raises(ValueError, match=r"a delta took (\d+) bytes, where all weights take \1"):
            weights._deltas(worker)


def test_an_update_that_fails_ends_the_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that fails ends the sending at once, not after the minutes that the other side is waited for."""
    errors = []

    class Sender(SharedMemorySender):
        def send(self, source: Any, *, delta: bool = False) -> SyncReport:
            try:
                return super().send(source, delta=delta)
            except Exception as error:
                errors.append(str(error))
                raise

    def fail(self: RolloutWorker, source: object, **options: Any) -> NoReturn:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(weight_updates, "TIMEOUT", 20.0)
    monkeypatch.setattr(weight_updates, "SharedMemorySender", Sender)
    monkeypatch.setattr(RolloutWorker, "receive_weights", fail)
    model = make_model("Qwen3", torch.bfloat16)
    with RolloutWorker(model, config=RolloutConfig(max_model_len=32)) as worker:
        weights = WeightsCheck(bind(model), ([[1, 2, 3]], [SamplingParams(max_tokens=2, seed=1)]), [], 32)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            weights._deltas(worker)
    assert len(errors) == 1
    assert "closed" in errors[0]


def test_of_a_large_model_the_first_weights_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first weights of a large model are trained: all of an 8B model, with what an optimizer keeps, would not
    fit a GPU beside the copies that are compared.
    """
    monkeypatch.setattr(weight_updates, "STEPS", 2)
    monkeypatch.setattr(weight_updates, "TRAINED_BYTES", 900_000)
    weights = WeightsCheck(bind(make_model("Qwen3", torch.float32)), ([[1, 2, 3]], [SamplingParams(seed=1)]), [], 32)
    with RolloutWorker(make_model("Qwen3", torch.float32), config=RolloutConfig(max_model_len=32)) as worker:
        assert weights._deltas(worker).beside[1:] == (0, 0.0)
    trained = [part for part in weights._other.parameters() if part.grad is not None]
    assert 0 < sum(part.nbytes for part in trained) <= 900_000
    assert len(trained) < len(list(weights._other.parameters()))


@pytest.mark.parametrize("owner", [check, Engine], ids=["in the trainer", "in a step"])
def test_too_little_memory_is_said_in_a_line(
    owner: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(owner, "step" if owner is Engine else "check_gemm_rows", full)
    assert cli.main(["check", folder]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("samebit check: ")]
    assert "CUDA out of memory. Tried to allocate 20 GiB" in line


@pytest.mark.parametrize("broken", ["no such folder", "no weights", "cut off", "jitter"])
def test_what_can_not_be_checked_is_one_line(
    broken: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Path(folder) / "model.safetensors"
    if broken == "no such folder":
        folder = str(tmp_path / "nothing")
    elif broken == "no weights":
        weights.unlink()
    elif broken == "cut off":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        make_model("Mixtral", router_jitter_noise=0.1).save_pretrained(folder)
    assert cli.main(["check", folder, "--json"]) == 2
    assert gc.isenabled(), "not while it loads its libraries, and then again"
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("samebit check: ")]
    assert {"jitter": "router_jitter_noise=0.1", "no weights": "no weights"}.get(broken, "") in line


@pytest.mark.parametrize(
    "arguments", [[], ["check"], ["check", "x", "--tokens", "0"], ["check", "x", "--dtype", "int8"]]
)
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)


@pytest.mark.parametrize(
    ("own", "policy", "spins"),
    [
        ({}, "PASSIVE", "4000"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE", "7"),
        ({"OMP_WAIT_POLICY": "active"}, "ACTIVE", "30000000000"),
    ],
)
def test_idle_threads_of_a_command_sleep_unless_the_user_says_otherwise(
    own: dict[str, str], policy: str, spins: str
) -> None:
    """Idle threads of a command sleep unless the user says otherwise. OpenMP prints what it read when it was loaded,
    which is before the command could say it in its own process.
    """
    program = "import sys; sys.modules['safetensors'] = None; from samebit.rollout import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", program, "check", "nothing"]
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        command, env={**others, "OMP_DISPLAY_ENV": "verbose", **own}, text=True, stderr=subprocess.PIPE, timeout=600
    )
    assert re.findall("OMP_WAIT_POLICY = '(.*)'", done.stderr)[-1] == policy
    assert re.findall("GOMP_SPINCOUNT = '(.*)'", done.stderr)[-1] == spins


def test_a_command_that_starts_over_for_that_has_the_processors_that_it_had() -> None:
    """OpenMP, where it binds threads, has bound the one that starts over to the first of its places."""
    program = "import sys; sys.modules['safetensors'] = None; from samebit.rollout import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", program, "check", "nothing"]
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    own = {"OMP_DISPLAY_ENV": "verbose", "OMP_PROC_BIND": "close"}
    done = subprocess.run(command, env=others | own, text=True, stderr=subprocess.PIPE, timeout=600)
    before, after = re.findall("OMP_PLACES = '(.*)'", done.stderr)
    assert before == after
