"""Models that Hugging Face wraps with vision are bound, loaded and updated for text, with the text model's bits."""

from __future__ import annotations

import copy
import json
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from samebit.kernels import bind, token_logprobs
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.audit import audit
from samebit.rollout.audit.adapters import TrainersAdapter
from samebit.rollout.cli import main
from samebit.rollout.errors import ModelLoadError
from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, WeightMismatchError, WeightStream

from .compare import assert_matches_trainer
from .families import CAMPAIGN, make_model, make_wrapped, token_ids
from .layouts import alone, assert_same_bits
from .lora import wake

FEW = SamplingParams(max_tokens=7, seed=5, ignore_eos=True)
SEQUENCES = token_ids(40, 3, 70)
IDS = torch.tensor(token_ids(20, 20))
CHUNK = RolloutConfig(block_size=64)


@pytest.fixture(scope="module")
def wrapped() -> PreTrainedModel:
    return bind(make_wrapped("Qwen3_5"))


def as_text(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model alone, bound, with the weights of a wrapped one."""
    return bind(text_of(model))


def text_of(model: PreTrainedModel) -> PreTrainedModel:
    alone = make_model("Qwen3_5")
    state = {name.replace(".language_model.", "."): tensor for name, tensor in model.state_dict().items()}
    alone.load_state_dict({name: tensor for name, tensor in state.items() if ".visual." not in name})
    return alone


def check(worker: RolloutWorker, model: PreTrainedModel) -> None:
    assert_matches_trainer(model, worker.generate(SEQUENCES, FEW), [FEW] * len(SEQUENCES))


def test_the_bits_of_the_text_model(wrapped: PreTrainedModel) -> None:
    text = as_text(wrapped)
    with torch.no_grad():
        assert_same_bits(alone(wrapped, SEQUENCES), alone(text, SEQUENCES))
        logits = text(IDS).logits
        for inputs in (
            {},
            {"mm_token_type_ids": torch.zeros_like(IDS)},
            {"position_ids": torch.arange(20).expand(3, 2, 20)},
            {"position_ids": torch.arange(20).expand(4, 1, 20)},
        ):
            assert torch.equal(wrapped(IDS, **inputs).logits, logits)
    with RolloutWorker(wrapped, config=CHUNK) as worker:
        check(worker, text)


def test_positions_of_a_padded_batch(wrapped: PreTrainedModel) -> None:
    """Positions of a padded batch may have other padding in each plane: Hugging Face gives it 1, and 0 in the plane of
    the text.
    """
    mask = torch.tensor([[0] * 5 + [1] * 15, [1] * 20])
    planes = torch.stack([(mask.cumsum(-1) - 1).masked_fill(mask == 0, fill) for fill in (0, 1, 1, 1)])
    with torch.no_grad():
        found = token_logprobs(wrapped, IDS, attention_mask=mask, position_ids=planes)
        assert torch.equal(found, token_logprobs(wrapped, IDS, attention_mask=mask))


def of_images(**inputs: Any) -> dict[str, Any]:
    return inputs


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (of_images(pixel_values=torch.zeros(4, 96)), "^pixel_values: .*computes text alone"),
        (
            of_images(pixel_values_videos=torch.zeros(4, 96), video_grid_thw=torch.tensor([[1, 2, 2]])),
            "^pixel_values_videos, video_grid_thw: ",
        ),
        (of_images(mm_token_type_ids=torch.ones_like(IDS)), r"^mm_token_type_ids \(with tokens of images\): "),
        (
            of_images(position_ids=torch.stack([torch.arange(20), torch.arange(20), torch.zeros(20).long()])[:, None]),
            "differ along the first axis: they are those of images",
        ),
    ],
)
def test_images_are_refused_by_name(wrapped: PreTrainedModel, inputs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        wrapped(IDS, **inputs)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_is_refused_and_none_is_handed_on(wrapped: PreTrainedModel) -> None:
    for name in ("cache", "past_key_values"):
        with pytest.raises(ValueError, match="a bound model keeps no Hugging Face cache"):
            wrapped(IDS, **{name: DynamicCache()})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # transformers 5.24 warns of the name that the argument had before
        assert torch.equal(wrapped.model(IDS).last_hidden_state, wrapped.model(IDS, past_key_values=None)[0])


def halved(model: PreTrainedModel) -> PreTrainedModel:
    """Return a trainer after a step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


@pytest.mark.parametrize(("name", "tied"), [("Qwen3_5", True), ("Qwen3_5Moe", False)])
def test_a_folder_and_every_way_of_an_update(name: str, tied: bool, tmp_path: Path) -> None:
    trainer = bind(make_wrapped(name, tied=tied))
    folder = tmp_path / "first"
    trainer.save_pretrained(folder)
    published(folder, tied=tied)
    with RolloutWorker(folder, config=CHUNK) as worker:
        assert type(worker.module).__name__ == f"{name}ForCausalLM"
        assert (worker.module.lm_head.weight is worker.module.model.embed_tokens.weight) is tied
        check(worker, trainer)
        halved(trainer).save_pretrained(tmp_path / "second")
        state = trainer.state_dict()
        for source in (tmp_path / "second", state, trainer, WeightStream.of(trainer), WeightStream.of(state)):
            report = worker.receive_weights(source, verify=True)
            assert report.changed_tensors == len(worker._weights.manifest.ties)
            check(worker, trainer)
            worker.receive_weights(folder)
        with SharedMemorySender() as sender, SharedMemoryReceiver(sender.address) as receiver:
            for weights in (trainer, state):
                worker.receive_weights(folder)
                sending = threading.Thread(target=sender.send, args=(weights,))
                sending.start()
                worker.receive_weights(receiver)
                sending.join()
                check(worker, trainer)


def published(folder: Path, *, tied: bool) -> None:
    """Make a saved folder what is published: the whole says whether the head is tied, and there are layers to draft."""
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["tie_word_embeddings"]
    config["text_config"]["num_nextn_predict_layers"] = 1
    assert config["tie_word_embeddings"] is tied
    (folder / "config.json").write_text(json.dumps(config))
    add(folder, "mtp.layers.0.mlp.up_proj.weight", "model.language_model.layers.3.input_layernorm.weight")


def add(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    stored = load_file(path)
    assert ("lm_head.weight" in stored) is not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    save_file({**stored, **{name: torch.ones(3) for name in names}}, path, metadata={"format": "pt"})


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    make_wrapped("Qwen3_5").save_pretrained(tmp_path)
    add(tmp_path, "model.language_model.layers.3.input_layernorm.weight", "model.language_model.gate.weight")
    named = r"2 tensors that the model has no place for: model\.(language_model\.)?gate\.weight, .*layers\.3\."
    with pytest.raises(ModelLoadError, match=named):
        RolloutWorker(tmp_path)
    with RolloutWorker(make_model("Qwen3_5")) as worker, pytest.raises(WeightMismatchError, match="2 unknown: "):
        worker.receive_weights(tmp_path)


ADAPTERS = {
    "names": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "in_proj_qkv", "down_proj"]),
    "all": LoraConfig(r=3, target_modules="all-linear"),  # those of vision too, which no text reaches
    "patterns": LoraConfig(
        r=4,
        target_modules=r"model\.language_model\.layers\.\d+\.(self_attn\.q|mlp\.down)_proj",
        rank_pattern={"model.language_model.layers.0.mlp.down_proj": 2},
        alpha_pattern={r"model\.language_model\.layers\.[01]\.mlp\.down_proj": 40},
    ),
}
THROUGH = SamplingParams(max_tokens=7, seed=5, ignore_eos=True, adapter="policy")


def adapted(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Return a trainer's model with an adapter that computes something, not yet bound."""
    trainer = get_peft_model(model, copy.deepcopy(config))
    wake(trainer)
    return trainer


def check_adapter(worker: RolloutWorker, trainer: PeftModel, params: SamplingParams = THROUGH) -> None:
    assert_matches_trainer(trainer, worker.generate(SEQUENCES, params), [params] * len(SEQUENCES))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_trained_with_vision_is_served_by_the_text_model(kind: str, tmp_path: Path) -> None:
    model = make_wrapped("Qwen3_5")
    text = as_text(model)
    trainer = bind(adapted(model, ADAPTERS[kind]))
    trainer.save_pretrained(tmp_path)
    tensors = get_peft_model_state_dict(trainer)
    with RolloutWorker(text, config=CHUNK) as worker:
        for source in (tmp_path, tensors, WeightStream.of(tensors)):
            worker.load_adapter("policy", source, config=ADAPTERS[kind])
            check_adapter(worker, trainer)
            worker.drop_adapter("policy")


@pytest.mark.parametrize("kind", ["names", "all", "patterns"])
def test_an_adapter_of_the_text_model_is_served_with_vision_around(kind: str) -> None:
    model = make_wrapped("Qwen3_5")
    config = copy.deepcopy(ADAPTERS[kind])
    if kind == "patterns":
        config.target_modules = config.target_modules.replace(r"language_model\.", "")
        for name in ("rank_pattern", "alpha_pattern"):
            patterns = getattr(config, name).items()
            setattr(config, name, {re.sub(r"language_model\\?\.", "", key): value for key, value in patterns})
    trainer = bind(adapted(text_of(model), config))
    with RolloutWorker(model, config=CHUNK) as worker:
        worker.load_adapter("policy", get_peft_model_state_dict(trainer), config=config)
        check_adapter(worker, trainer)


@pytest.mark.parametrize("kind", ["all", "patterns"])
def test_a_folder_of_an_adapter_trained_with_vision(kind: str, tmp_path: Path) -> None:
    """A folder of an adapter trained with vision loads its model as text, in a worker and in a check."""
    model = make_wrapped("Qwen3_5")
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    trainer = adapted(model, ADAPTERS[kind])
    trainer.save_pretrained(tmp_path / "adapter")
    with RolloutWorker(tmp_path / "adapter", config=CHUNK) as worker:
        check_adapter(worker, bind(trainer), FEW)
    as_peft = TrainersAdapter.of(make_model("Qwen3_5"), tmp_path / "adapter")
    expected, found = matrices(trainer), matrices(as_peft.model)
    assert {name: torch.equal(tensor, found[name]) for name, tensor in expected.items()} == dict.fromkeys(found, True)


def matrices(trainer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the matrices of an adapter on text, by the names of the text model alone."""
    found = {name.replace(".language_model.", "."): one for name, one in trainer.named_parameters()}
    return {name: one for name, one in found.items() if ".lora_" in name and ".visual." not in name}


def test_another_model_with_vision_is_another_model() -> None:
    """An adapter with the names of a wrapped model is refused by Qwen3, which is never wrapped: it was trained on
    another model.
    """
    config = LoraConfig(r=4, target_modules=["q_proj"])
    tensors = get_peft_model_state_dict(get_peft_model(make_model("Qwen3"), config))
    other = {name.replace("model.layers.", "model.language_model.layers."): one for name, one in tensors.items()}
    with RolloutWorker(make_model("Qwen3")) as worker, pytest.raises(WeightMismatchError, match=r"\d unknown: "):
        worker.load_adapter("policy", other, config=config)


@pytest.mark.soak
def test_check_and_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapped model passes check and bench. Under `make soak` all rows; otherwise those of the prefix cache and of
    the states.
    """
    if not CAMPAIGN:
        for part in ("weights", "schedules", "temperatures", "layouts"):
            monkeypatch.setattr(audit._Check, part, lambda self: iter(()))
    make_wrapped("Qwen3_5").save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--tokens", "4"]) == 0, capsys.readouterr().out
    assert "every bit agrees" in capsys.readouterr().out
    assert main(["bench", str(tmp_path), "--memory"]) == 0
    assert "state of a checkpoint" in capsys.readouterr().out
