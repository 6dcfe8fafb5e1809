"""Folders that can not be loaded raise `ModelLoadError` in a worker, and give one line and exit code 2 on the command
line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebit.kernels import BindingError
from samebit.rollout.cli import main
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.worker import RolloutWorker

from ..tiny_llama import byte_fallback_tokenizer, smallest

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    smallest().save_pretrained(folder)
    return folder


def setting(**changes: object) -> Damage:
    """Change fields of the config."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def writing(name: str, text: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def truncating(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: dict[str, Damage] = {
    "wider": setting(hidden_size=32),
    "more layers": setting(num_hidden_layers=2),
    "no layers": setting(num_hidden_layers=-1),
    "other vocabulary": setting(vocab_size=51),
    "heads that do not divide": setting(num_attention_heads=3, head_dim=None),
    "no heads": setting(num_attention_heads=0),
    "unknown activation": setting(hidden_act="no_such_act"),
    "activation is a number": setting(hidden_act=3),
    "unknown rope": setting(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    "rope is a list": setting(rope_parameters=[1, 2]),
    "rope theta is a word": setting(rope_parameters={"rope_type": "default", "rope_theta": "big"}),
    "size is a word": setting(hidden_size="sixteen"),
    "epsilon is a word": setting(rms_norm_eps="tiny"),
    "length is a word": setting(max_position_embeddings="forty"),
    "length is null": setting(max_position_embeddings=None),
    "length is negative": setting(max_position_embeddings=-1),
    "end token is a word": setting(eos_token_id="end"),
    "padding outside": setting(pad_token_id=999),
    "unknown family": setting(model_type="no_such_model"),
    "no family": setting(model_type=None),
    "family is a list": setting(model_type=["llama"]),
    "unknown dtype": setting(dtype="float99"),
    "config is a list": writing("config.json", "[]"),
    "config is a word": writing("config.json", '"llama"'),
    "config is null": writing("config.json", "null"),
    "config is no json": writing("config.json", "{"),
    "config is empty": writing("config.json", ""),
    "config is no text": writing("config.json", b"\xff\xfe\x00"),
    "generation config is a list": writing("generation_config.json", "[]"),
    "end tokens are words": writing("generation_config.json", '{"eos_token_id": ["a", "b"]}'),
    "tokenizer is no json": writing("tokenizer.json", "{"),
    "tokenizer is empty": writing("tokenizer_config.json", ""),
    "weights truncated": truncating,
    "weights empty": writing("model.safetensors", b""),
    "weights are noise": writing("model.safetensors", b"\xff" * 64),
    "header is noise": writing("model.safetensors", (8).to_bytes(8, "little") + b"notjson!"),
    "weights are a folder": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors").mkdir(),
    ),
    "index of nothing": index_of_nothing,
    "config is a folder": lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
    "no files": lambda folder: [file.unlink() for file in folder.iterdir()],
}
NEEDS_NO_TOKENIZER = {"tokenizer is no json", "tokenizer is empty"}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(
    healthy: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    DAMAGES[name](folder)
    with pytest.raises((ModelLoadError, BindingError)) as caught:
        RolloutWorker(folder)
    assert type(caught.value) is ModelLoadError or "rope" in name or "activation" in name
    capfd.readouterr()
    if name in NEEDS_NO_TOKENIZER:
        assert "the tokenizer of" in str(caught.value)
        RolloutWorker(folder, tokenizer=byte_fallback_tokenizer()).close()
        assert main(["bench", str(folder), "--memory"]) == 0
        return
    for command in (["check", str(folder)], ["bench", str(folder), "--memory"]):
        assert main(command) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"samebit {command[0]}: ")


@pytest.mark.parametrize(
    "named",
    [
        {"model_type": "its own", "auto_map": {"AutoConfig": "its_own.Config"}},
        {"model_type": "clip", "auto_map": {"AutoModelForCausalLM": "its_own.Config"}},
    ],
    ids=["config", "model"],
)
def test_code_of_a_folder_is_never_run_and_nobody_is_asked(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any]
) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(healthy, folder)
    setting(**named)(folder)
    writing("its_own.py", f"open({str(ran)!r}, 'w').close()\nclass Config: pass\n")(folder)
    monkeypatch.setattr("builtins.input", lambda *shown: "y")
    with pytest.raises(ModelLoadError):
        RolloutWorker(folder)
    assert not ran.exists()
