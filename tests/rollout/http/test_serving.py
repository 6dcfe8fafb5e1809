"""A server does some things once, before its first request."""

from __future__ import annotations

import gc
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samebit.rollout.integrations.http.serving import load, settle
from samebit.rollout.integrations.http.settings import read_setup
from samebit.rollout.structured_outputs.grammars import Grammars

from ...patience import HANG
from .served import Served, serving


def test_what_was_loaded_is_not_collected_again() -> None:
    """What was loaded is not collected again, for the rest of the process: what other tests have left would be gone
    through again.
    """
    settle()
    assert gc.get_freeze_count() > 100_000
    assert len(gc.get_objects()) < gc.get_freeze_count() // 100


def test_a_folder_called_as_a_tokenizers_file_is_no_tokenizer(served: Served, tmp_path: Path) -> None:
    """A folder called as a tokenizer's file is no tokenizer, for the server as for the worker: ids are served, and
    texts refused by name.
    """
    folder = tmp_path / "model"
    shutil.copytree(served.folder, folder, ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"])
    (folder / "tokenizer.json").mkdir()
    with serving(folder, "--num-blocks", "8") as other:
        answer = other.post("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}})
        assert answer.status_code == 200
        refused = other.post("/v1/completions", {"prompt": "a"})
        assert (refused.status_code, "has no tokenizer" in refused.text) == (400, True)


FIRST_PROCESS = """
import os, signal, sys
from samebit.rollout.integrations.http import serving
def killed(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit("the signal was lost")
serving.read_setup = killed
serving.main([])
"""


def test_a_sigterm_ends_a_first_process_of_a_container_that_loads() -> None:
    """The kernel drops a signal that the first process of a container has no handler for."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*apart, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs to make a namespace of processes")
    done = subprocess.run([*apart, sys.executable, "-c", FIRST_PROCESS], check=False, timeout=HANG)
    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("installed", [True, False])
def test_a_tokenizer_is_read_for_grammars_before_anything_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """The tokenizer is read while the server loads; without the library it loads all the same."""
    read, times = Grammars._read_tokenizer, []

    def noted(self: Grammars) -> object:
        found = read(self)
        times.append(found)
        return found

    monkeypatch.setattr(Grammars, "_read_tokenizer", noted)
    if not installed:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    worker = load(read_setup([str(served.folder), "--num-threads", "1"], {})).worker
    worker.close()
    assert len(times) == installed
