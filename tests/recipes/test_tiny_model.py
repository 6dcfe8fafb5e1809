"""The built-in tokenizer and model come back from the folder that they are saved in."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from samebit.recipes import tiny_model

TEXT = "[3-5=-2;-2+9=7]7"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tiny_model.build_tokenizer()
    tiny_model.save(tiny_model.build_model(tokenizer, seed=0, num_hidden_layers=1), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def test_text_survives_the_saved_tokenizer(folder: Path) -> None:
    _, tokenizer = tiny_model.load(folder)
    ids = tokenizer(TEXT).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + len(TEXT)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == TEXT
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == ids[1:]
    assert tokenizer("x").input_ids == [tokenizer.bos_token_id, tokenizer.unk_token_id]


def test_the_saved_model_is_the_built_one(folder: Path) -> None:
    model, tokenizer = tiny_model.load(folder)
    built = tiny_model.build_model(tokenizer, seed=0, num_hidden_layers=1)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_policy_with_a_generation_config_that_transformers_warns_about_is_saved_with_it(folder: Path) -> None:
    """A policy is saved with the generation config it came with, which transformers reads but would refuse to write."""
    asked = {"temperature": 0.6, "top_p": 0.9, "pad_token_id": -1, "eos_token_id": [2, 3]}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    model, tokenizer = tiny_model.load(folder)
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    tiny_model.save(model, tokenizer, folder.with_name("trained"))
    again, _ = tiny_model.load(folder.with_name("trained"))
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)
    assert again.generation_config.to_diff_dict().items() >= asked.items()
    assert again.generation_config == model.generation_config


def test_seeds_give_different_models() -> None:
    tokenizer = tiny_model.build_tokenizer()
    first, second = (tiny_model.build_model(tokenizer, seed, num_hidden_layers=1) for seed in (0, 1))
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        tiny_model.load(tmp_path / "nowhere")


def test_a_tokenizer_without_padding_pads_with_any_token() -> None:
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "<eos>", None
    assert tiny_model.pad_id(tokenizer) == 0
