"""Models that can not be served are refused, each with its cause; and the few facts of one that can are right."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.models.loading import load_model
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.weight_sync import WeightMismatchError

from ..tiny_llama import smallest

DEFAULT = RolloutConfig()


def tiny(**changes: object) -> LlamaForCausalLM:
    return smallest(**{"eos_token_id": [3, 4], **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path)
    return tmp_path


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_folder_gives_an_own_model_with_its_facts(folder: Path) -> None:
    loaded = load_model(folder, DEFAULT)
    assert not loaded.shared
    assert (loaded.max_model_len, loaded.eos_token_ids) == (40, (3, 4))
    assert loaded.module.dtype == torch.float32
    assert load_model(str(folder), RolloutConfig(dtype="bfloat16")).module.dtype == torch.bfloat16
    assert load_model(folder, RolloutConfig(max_model_len=24)).max_model_len == 24


def test_frequencies_that_older_versions_saved_in_each_layer_do_not_stand_in_the_way(folder: Path) -> None:
    path = folder / "model.safetensors"
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in range(2)}
    save_file(load_file(path) | old, path, metadata={"format": "pt"})
    with RolloutWorker(folder) as worker:
        assert worker.receive_weights(folder).version == 1
        save_file(load_file(path) | {"rotary_emb.inv_freq.more": torch.ones(2)}, path, metadata={"format": "pt"})
        with pytest.raises(WeightMismatchError, match=r"1 unknown: rotary_emb\.inv_freq\.more"):
            worker.receive_weights(folder)


def test_auto_takes_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    tiny().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, DEFAULT).module.dtype == torch.bfloat16
    assert load_model(tmp_path, RolloutConfig(dtype="float32")).module.dtype == torch.float32


def test_a_module_is_taken_as_it_is() -> None:
    module = tiny().train()
    loaded = load_model(module, DEFAULT)
    assert loaded.module is module
    assert loaded.shared
    assert module.training


def test_the_model_limits_max_model_len() -> None:
    with pytest.raises(ModelLoadError, match="max_model_len=41 is more than the model's 40"):
        load_model(tiny(), RolloutConfig(max_model_len=41))


def test_folders_without_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such model folder"):
        load_model(tmp_path / "nowhere", DEFAULT)
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path, DEFAULT)
    tiny().config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="has no weights"):
        load_model(tmp_path, DEFAULT)


def test_a_missing_tensor_is_never_made_up(folder: Path) -> None:
    edit_weights(folder, **{"model.layers.0.mlp.up_proj.weight": None})
    with pytest.raises(ModelLoadError, match=r"lack 1 tensors: model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(folder, DEFAULT)


def test_a_tensor_of_another_shape_is_refused_by_name_and_shapes(folder: Path) -> None:
    edit_weights(folder, **{"model.norm.weight": torch.ones(17)})
    with pytest.raises(
        ModelLoadError, match=r"other shapes than the model's: model\.norm\.weight \[17\], the model \[16\]"
    ):
        load_model(folder, DEFAULT)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "can not be read: .*"), ("[1]", "must hold an object, and holds a list")]
)
def test_a_generation_config_that_can_not_be_read_is_refused(folder: Path, text: str, said: str) -> None:
    """A generation config that can not be read is refused: it has the end tokens, without which requests would run to
    their length.
    """
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json {said}"):
        load_model(folder, DEFAULT)


def test_nan_weights_are_refused_by_name(folder: Path) -> None:
    edit_weights(folder, **{"model.norm.weight": torch.full((16,), float("nan"))})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight in .* holds NaN"):
        load_model(folder, DEFAULT)


def test_dtypes_that_are_not_served() -> None:
    with pytest.raises(ModelLoadError, match=r"is torch\.float16; supported on cpu are float32, bfloat16"):
        load_model(tiny().half(), DEFAULT)
    with pytest.raises(ModelLoadError, match=r"is torch\.float32; a module is served as it is"):
        load_model(tiny(), RolloutConfig(dtype="bfloat16"))


def test_what_is_for_a_folder_is_refused_for_a_module() -> None:
    for config in (RolloutConfig(dequantize=True), RolloutConfig(revision="main")):
        with pytest.raises(ModelLoadError, match=r"(dequantize=True|revision='main') is for .*, and this is a module"):
            load_model(tiny(), config)


def test_end_tokens_that_are_no_numbers() -> None:
    module = tiny()
    for given in (2.0, "end", True, [3, "4"]):
        module.generation_config.eos_token_id = given
        with pytest.raises(ModelLoadError, match="eos_token_id must be an int or several, got"):
            load_model(module, DEFAULT)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"config": {}}, r"config must be a RolloutConfig or None, got \{\}"),
        ({"config": RolloutConfig}, "config must be a RolloutConfig or None, got <class"),
        ({"tokenizer": "gpt2"}, r"must have a method decode\(token_ids, .* got 'gpt2'"),
        ({"tokenizer": 5}, "must have a method decode"),
    ],
)
def test_what_else_a_worker_is_given_is_checked(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        RolloutWorker(tiny(), **given)


@pytest.mark.parametrize("config", [RolloutConfig(num_blocks=10**12), RolloutConfig(kv_cache_gb=1e9)])
def test_more_memory_than_there_is(config: RolloutConfig) -> None:
    with pytest.raises(ValueError, match=r"KV blocks need .* GiB, and this machine has .*: give a smaller num_blocks"):
        RolloutWorker(tiny(), config=config)


def test_end_tokens_outside_the_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    """End tokens outside the vocabulary, as configs of cut-down models have them, do no harm: what one request masks
    must not take the others down.
    """
    with RolloutWorker(tiny(eos_token_id=[3, 50, 151645, -1])) as worker:
        assert worker.eos_token_ids == (3,)
        (output,) = worker.generate([[1, 2]], SamplingParams(max_tokens=4, min_tokens=4))
        worker.check_usable()
    assert len(output.samples[0].token_ids) == 4
    assert "eos_token_id names 50, 151645, -1, outside the vocabulary (0 to 49)" in caplog.text


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), tiny().model, 3, None])
def test_other_objects_are_no_model(wrong: object) -> None:
    with pytest.raises(ModelLoadError, match=f"got {type(wrong).__name__}"):
        RolloutWorker(wrong)


def test_a_model_on_two_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on two GPUs is refused, as `device_map="auto"` makes them. Torch's fake tensors stand in for those of
    GPUs.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = tiny()
    with FakeTensorMode():
        for number, layer in enumerate(module.modules()):
            for name, part in layer.named_parameters(recurse=False):
                device = "cuda:1" if number > 5 else "cuda:0"
                setattr(layer, name, nn.Parameter(torch.empty(part.shape, device=device)))
    with pytest.raises(ModelLoadError, match=r"is on cuda:1, .* on cuda:0: a worker has one GPU"):
        load_model(module, RolloutConfig(device="cuda"))


def test_folders_are_read_one_after_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are read one after the other: two readings that overlap leave classes of transformers without
    `tie_weights`, for all later models.
    """
    read, both = AutoModelForCausalLM.from_pretrained, threading.Barrier(2)
    overlaps: list[bool] = []

    def noted(*args: Any, **options: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
            overlaps.append(True)
        return read(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: load_model(folder, DEFAULT), range(2)))
    assert not overlaps
