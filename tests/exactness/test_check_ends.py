"""`samebit check` that ends without an answer finds no difference, and an unforeseen error says where it began."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from samebit.kernels import bind
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams, cli
from samebit.rollout.audit import audit
from samebit.rollout.audit.weight_updates import WeightsCheck
from samebit.rollout.audit.workers import compared_config
from samebit.rollout.errors import NoTokenLeftError, SelfTestError
from samebit.weight_sync import SyncBrokenError

from .families import make_model


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (SelfTestError("row 3 differs in layer 1"), True),
        (SyncBrokenError("the other side is gone"), True),
        (NoTokenLeftError("no token to choose"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (KeyError("lost"), False),
    ],
)
def test_what_ends_a_check_is_no_difference(
    error: Exception, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ends a check gives exit code 2, not 1, which is for bits that differ. What is not foreseen may be a bug:
    where it came from is printed too.
    """

    def fail(model: object) -> NoReturn:
        raise error

    make_model("Qwen3", torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(audit, "check_gemm_rows", fail)
    assert cli.main(["check", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.endswith(
        f"samebit check: {error}\n" if known else f"samebit check: {type(error).__name__}: {error}\n"
    )
    assert ("Traceback" in printed) == ("in fail" in printed) == (not known)


@pytest.mark.parametrize(
    ("command", "threads"), [("check", {}), ("bench", {"OMP_WAIT_POLICY": "passive"}), ("serve", {})]
)
def test_libraries_that_can_not_be_loaded_are_no_difference(command: str, threads: dict[str, str]) -> None:
    """A library that can not be loaded is no difference: in an image without libgomp the line says what to install. It
    is loaded first; torch is not there either.
    """
    program = (
        "import sys; sys.modules.update({'numba.np.ufunc.omppool': None, 'torch': None}); "
        "from samebit.rollout import cli; sys.exit(cli.main())"
    )
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", program, command, "nothing"],
        env=others | threads,
        text=True,
        stderr=subprocess.PIPE,
        timeout=600,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"samebit {command}: samebit needs an OpenMP runtime for Numba")


def test_where_compiled_code_can_be_kept_nowhere_a_line_says_what_to_set() -> None:
    """A line says what to set where compiled code can be kept nowhere: in a container whose user has no home, and whose
    packages are root's.
    """
    own = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "OMP_WAIT_POLICY": "passive"}
    others = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    command = [sys.executable, "-m", "samebit.rollout.cli", "check", "nothing"]
    done = subprocess.run(command, env=others | own, text=True, stderr=subprocess.PIPE, timeout=600)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("samebit check: ")
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in line


def test_a_generation_config_that_transformers_warns_about_ends_no_check() -> None:
    """A generation config that transformers warns about, and does not save, ends no check. A chat model may have its
    end tokens in it.
    """
    model = make_model("Qwen3", torch.bfloat16)
    prompt, params = [[1, 2, 3]], [SamplingParams(max_tokens=8, seed=1)]
    with RolloutWorker(model, config=RolloutConfig(max_model_len=32)) as worker:
        third = worker.generate(prompt, params)[0].samples[0].token_ids[2]
    model.generation_config.update(temperature=0.6, pad_token_id=-1, eos_token_id=[third])
    with RolloutWorker(model, config=RolloutConfig(max_model_len=32)) as worker:
        first = worker.generate(prompt, params)
    assert first[0].samples[0].finish_reason == "stop"
    with closing(WeightsCheck(model, (prompt, params), first, 32).runs()) as runs:
        run = next(runs)
    assert run.name == "weights saved and loaded again"
    assert run.outputs[0].samples[0].token_ids == first[0].samples[0].token_ids


def test_a_worker_that_is_compared_does_not_test_itself() -> None:
    """A worker that is compared does not test itself, as it would by default on a GPU, and end a check that is to say
    what differs.
    """
    model = bind(make_model("Qwen3", torch.bfloat16))
    assert compared_config(model).self_test is False
    assert compared_config(model, self_test=True).self_test is True
