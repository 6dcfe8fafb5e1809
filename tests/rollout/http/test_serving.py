"""A server does some things once, before its first request."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

from samebit.rollout.integrations.http.serving import settle

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
