"""Models that Hugging Face wraps with vision are bound, loaded and updated for text, with the text model's bits."""

from __future__ import annotations

import copy
import json
import re
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    DynamicCache,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLTextConfig,
)

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.kernels.binding import binding_of
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.audit import audit
from samebit.rollout.audit.adapters import TrainersAdapter
from samebit.rollout.cli import main
from samebit.rollout.errors import ModelLoadError
from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, WeightMismatchError, WeightStream

from .compare import assert_matches_trainer
from .families import (
    CAMPAIGN,
    CORRECTIONS,
    DTYPES,
    WHOLES,
    cast,
    in_text,
    make_config,
    make_model,
    make_wrapped,
    paired,
    token_ids,
)
from .gradients import hugging_face, relative_error
from .layouts import alone, assert_same_bits
from .lora import wake

FEW = SamplingParams(max_tokens=7, seed=5, ignore_eos=True)
SEQUENCES = token_ids(40, 3, 70)
IDS = torch.tensor(token_ids(20, 20))
CHUNK = RolloutConfig(block_size=64)
VISION = re.compile(r"\.((visual|vision_tower|multi_modal_projector|audio_tower|embed_(vision|audio))\.|image_newline)")
GEMMA4, GEMMA4_EXPERTS = "Gemma4, inputs of layers, shared keys", "Gemma4, experts"
GEMMAS = ("Gemma3", GEMMA4, GEMMA4_EXPERTS, "Gemma4Unified")
AROUND_ANY = (
    "Qwen3 in InternVL",
    "GptOss in InternVL",
    "Llama in Llava",
    "Mistral in LlavaNext",
    "Qwen2 in LlavaOnevision",
)
"""Lists kinds of vision around any text model with a few of the families that they hold."""
GLMS = ("Glm4, as inside of GLM-4.1V", "Glm4Moe, biases")
FOLDERS = (
    *("Qwen3_5", "Qwen3_5Moe", *GEMMAS, "Mistral", "Ministral3", *GLMS, "Qwen2", "Qwen3", "Qwen3Moe", "Lfm2"),
    *AROUND_ANY,
)
"""Lists families whose folders with vision load as their text models."""
KINDS = tuple(name for name in WHOLES if CAMPAIGN or name in AROUND_ANY or name == in_text(name))
"""Lists kinds of vision and families; without `make soak` not all that those around any text model hold."""


@cache
def bound_whole(name: str) -> PreTrainedModel:
    """Return a bound model with vision that tests share: they don't change it."""
    return bind(make_wrapped(name))


@pytest.fixture(scope="module")
def wrapped() -> PreTrainedModel:
    return bound_whole("Qwen3_5")


def as_text(model: PreTrainedModel, name: str = "Qwen3_5") -> PreTrainedModel:
    """Return the text model alone, bound, with the weights of a wrapped one."""
    return bind(text_of(model, name))


def text_of(model: PreTrainedModel, name: str = "Qwen3_5") -> PreTrainedModel:
    alone = make_model(name, tie_word_embeddings=model.config.tie_word_embeddings)
    state = {name.replace(".language_model.", "."): tensor for name, tensor in model.state_dict().items()}
    alone.load_state_dict({name: tensor for name, tensor in state.items() if not VISION.search(name)})
    return alone


def check(worker: RolloutWorker, model: PreTrainedModel) -> None:
    assert_matches_trainer(model, worker.generate(SEQUENCES, FEW), [FEW] * len(SEQUENCES))


@pytest.mark.parametrize("name", KINDS)
def test_the_bits_of_the_text_model(name: str) -> None:
    whole = bound_whole(name)
    text = as_text(whole, name)
    with torch.no_grad():
        assert_same_bits(alone(whole, SEQUENCES), alone(text, SEQUENCES))
        logits = text(IDS).logits
        for inputs in (
            {},
            {"labels": IDS},
            {"mm_token_type_ids": torch.zeros_like(IDS)},
            {"token_type_ids": torch.zeros_like(IDS)},
            {"position_ids": torch.arange(20).expand(3, 2, 20)},
            {"position_ids": torch.arange(20).expand(4, 1, 20)},
        ):
            assert torch.equal(whole(IDS, **inputs).logits, logits)
    with RolloutWorker(whole, config=CHUNK) as worker:
        check(worker, text)


@pytest.mark.parametrize(("name", "dtype"), paired(KINDS, DTYPES))
def test_near_hugging_face(name: str, dtype: torch.dtype) -> None:
    """A bound model with vision is near one of the same class that is not bound, in float64."""
    model = cast(make_wrapped(name), dtype)
    with torch.no_grad():
        exact = hugging_face(copy.deepcopy(model).double(), SEQUENCES)
        found = alone(bind(model), SEQUENCES)
    assert relative_error(torch.cat(found), torch.cat(exact)) < {torch.float32: 1e-6, torch.bfloat16: 0.03}[dtype]


def test_positions_of_a_padded_batch(wrapped: PreTrainedModel) -> None:
    """Positions of a padded batch may have other padding in each plane: Hugging Face gives it 1, and 0 in the plane of
    the text.
    """
    mask = torch.tensor([[0] * 5 + [1] * 15, [1] * 20])
    planes = torch.stack([(mask.cumsum(-1) - 1).masked_fill(mask == 0, fill) for fill in (0, 1, 1, 1)])
    with torch.no_grad():
        found = token_logprobs(wrapped, IDS, attention_mask=mask, position_ids=planes)
        assert torch.equal(found, token_logprobs(wrapped, IDS, attention_mask=mask))


def of_interest(*names: str) -> tuple[str, ...]:
    """Return all families under `make soak`, and otherwise these."""
    return tuple(WHOLES) if CAMPAIGN else names


def of_images(**inputs: Any) -> dict[str, Any]:
    return inputs


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (
            of_images(pixel_values=torch.zeros(4, 96)),
            "^pixel_values: .*computes text alone|without image_grid_thw",
        ),
        (
            of_images(pixel_values_videos=torch.zeros(4, 96), video_grid_thw=torch.tensor([[1, 2, 2]])),
            "^pixel_values_videos, video_grid_thw: ",
        ),
        (of_images(mm_token_type_ids=torch.ones_like(IDS)), r"^mm_token_type_ids \(with tokens of images\): "),
        (of_images(token_type_ids=torch.eye(20)[:1].long()), r"^token_type_ids \(with tokens of images\): "),
        (of_images(image_sizes=torch.ones(1, 2)), "^image_sizes: "),
        (
            of_images(spatial_shapes=torch.ones(1, 2), pixel_attention_mask=torch.ones(1, 4)),
            "^spatial_shapes, pixel_attention_mask: ",
        ),
        (
            of_images(image_sizes_videos=torch.ones(1, 2), batch_num_images=torch.ones(1)),
            "^image_sizes_videos, batch_num_images: ",
        ),
        (
            of_images(position_ids=torch.stack([torch.arange(20), torch.arange(20), torch.zeros(20).long()])[:, None]),
            "differ along the first axis: they are those of images",
        ),
    ],
)
@pytest.mark.parametrize("name", of_interest("Qwen3_5", "Gemma3", "Mistral", "Qwen3", "Lfm2", *AROUND_ANY))
def test_images_are_refused_by_name(name: str, inputs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        bound_whole(name)(IDS, **inputs)


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
    weights = [tensor for name, tensor in model.named_buffers() if name.endswith(("layer_scalar", *CORRECTIONS))]
    with torch.no_grad():
        for tensor in (*model.parameters(), *weights):
            tensor.mul_(0.5)
    return model


@pytest.mark.parametrize(
    ("name", "tied"), [(name, "Moe" not in name and not name.endswith("Llava")) for name in FOLDERS]
)
def test_a_folder_and_every_way_of_an_update(name: str, tied: bool, tmp_path: Path) -> None:
    trainer = bind(make_wrapped(name, tied=tied))
    folder = tmp_path / "first"
    trainer.save_pretrained(folder)
    published(folder, tied=tied)
    with RolloutWorker(folder, config=CHUNK) as worker:
        assert type(worker.module).__name__ == f"{in_text(name.partition(',')[0])}ForCausalLM"
        assert worker.module.config.eos_token_id == [2, 5]
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
    """Make a saved folder what is published: the whole says whether the head is tied and which tokens end a text, and
    there may be layers to draft, and keys that Gemma-4's layers do not read."""
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["tie_word_embeddings"]
    assert config["tie_word_embeddings"] is tied
    config["eos_token_id"] = [2, 5]
    if config["model_type"].startswith("qwen3_5"):
        config["text_config"]["num_nextn_predict_layers"] = 1
        add(folder, "mtp.layers.0.mlp.up_proj.weight", "model.language_model.layers.3.input_layernorm.weight")
    if config["model_type"] == "gemma4" and config["text_config"]["num_kv_shared_layers"]:
        add(folder, *(f"model.language_model.layers.3.self_attn.{name}.weight" for name in ("k_proj", "v_proj")))
    if config["model_type"].startswith("glm4v"):
        rope = config["text_config"].pop("rope_parameters")
        turned = {"rope_type": "default", "mrope_section": rope.pop("mrope_section")}
        config["text_config"].update(**rope, rope_scaling=turned)
    if config["model_type"] == "qwen2_5_vl":  # whose published configs are flat
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        turned = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": turned}
    (folder / "config.json").write_text(json.dumps(config))


def add(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    stored = load_file(path)
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert any(name.endswith("lm_head.weight") for name in stored) is not tied
    save_file({**stored, **{name: torch.ones(3) for name in names}}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["Qwen3_5", "Gemma3"])
def test_a_tensor_without_a_place_is_named(name: str, tmp_path: Path) -> None:
    make_wrapped(name).save_pretrained(tmp_path)
    add(tmp_path, "model.language_model.layers.3.input_layernorm.weight", "model.language_model.gate.weight")
    found = r"2 tensors that the model has no place for|2 unknown"
    named = rf"({found}): model\.(language_model\.)?(gate\.weight, .*layers\.3\.|layers\.3\..*gate\.weight)"
    with pytest.raises(ModelLoadError, match=named):
        RolloutWorker(tmp_path)
    with RolloutWorker(make_model(name)) as worker, pytest.raises(WeightMismatchError, match="2 unknown: "):
        worker.receive_weights(tmp_path)


def rename(folder: Path, names: dict[str, str]) -> None:
    """Give the tensors of a folder other names: by regular expressions of the old ones, what stands in their place."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for pattern, name in names.items():
        stored = {re.sub(pattern, name, key): tensor for key, tensor in stored.items()}
    save_file(stored, path, metadata={"format": "pt"})
    assert any(key.startswith(next(iter(names.values()))) for key in stored)


NAMES = {
    "before transformers 4.52, and in most published folders": {
        r"^model\.language_model\.": "language_model.model.",
        r"^model\.(vision_tower|multi_modal_projector|image_newline)": r"\1",
        r"^lm_head": "language_model.lm_head",
    },
    "of the module": {
        r"^language_model\.model\.": "model.language_model.",
        r"^(vision_tower|multi_modal_projector|image_newline)": r"model.\1",
        r"^language_model\.lm_head": "lm_head",
    },
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("Gemma3", True),
        ("Gemma3", False),
        ("Mistral", False),
        ("Qwen3Moe in InternVL", False),
        ("Qwen2 in LlavaNext", False),
    ],
)
def test_names_in_a_folder(name: str, tied: bool, names: str, tmp_path: Path) -> None:
    """A folder with older or newer names loads and updates both kinds of models; where its config ties a head that it
    has with other values, the head is its own, as transformers reads it."""
    model = make_wrapped(name, tied=tied)
    model.save_pretrained(tmp_path)
    rename(tmp_path, NAMES[names])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    trainer = bind(type(model).from_pretrained(tmp_path))
    assert (trainer.lm_head.weight is trainer.model.language_model.embed_tokens.weight) is tied
    assert_same_bits(alone(trainer, SEQUENCES), alone(bind(model), SEQUENCES))
    with RolloutWorker(tmp_path, config=CHUNK) as worker:
        assert (worker.module.lm_head.weight is worker.module.model.embed_tokens.weight) is tied
        check(worker, trainer)
        assert worker.receive_weights(tmp_path, verify=True).changed_tensors == 0
    with RolloutWorker(halved(trainer), config=CHUNK) as worker:
        worker.receive_weights(tmp_path, verify=True)
        check(worker, bind(model))


def test_a_folder_of_a_published_llava_updates_its_class(tmp_path: Path) -> None:
    """The names of CLIP had one more part when Llava's models were published; the text model leaves them out."""
    model = make_wrapped("Llama in Llava")
    model.save_pretrained(tmp_path)
    rename(tmp_path, {r"^vision_tower\.": "vision_tower.vision_model."})
    with RolloutWorker(halved(bind(make_wrapped("Llama in Llava"))), config=CHUNK) as worker:
        worker.receive_weights(tmp_path, verify=True)
        assert all(torch.equal(one, worker.module.state_dict()[key]) for key, one in model.state_dict().items())
    with RolloutWorker(tmp_path, config=CHUNK) as worker:
        check(worker, bind(model))


def test_an_adapter_of_a_llama_inside_of_a_llava_is_served_by_the_llama() -> None:
    model = make_wrapped("Llama in LlavaNext")
    text = as_text(model, "Llama")
    trainer = bind(adapted(model, ADAPTERS["all"]))
    with RolloutWorker(text, config=CHUNK) as worker:
        worker.load_adapter("policy", get_peft_model_state_dict(trainer), config=ADAPTERS["all"])
        check_adapter(worker, trainer)


@pytest.mark.parametrize("name", ["Llama in Llava", "Qwen3 in InternVL"])
def test_an_adapter_with_the_names_before_transformers_4_52(name: str, tmp_path: Path) -> None:
    model = make_wrapped(name)
    text = as_text(model, in_text(name))
    trainer = bind(adapted(model, ADAPTERS["all"]))
    tensors = get_peft_model_state_dict(trainer)
    old = {key.replace(".model.language_model.", ".language_model.model."): one for key, one in tensors.items()}
    old = {re.sub(r"\.model\.(vision_tower|multi_modal_projector)\.", r".\1.", key): one for key, one in old.items()}
    assert not old.keys() & tensors.keys()
    trainer.save_pretrained(tmp_path)
    save_file(old, tmp_path / "adapter_model.safetensors")
    for source in (old, tmp_path):
        for served in (text, make_wrapped(name)):
            with RolloutWorker(served, config=CHUNK) as worker:
                worker.load_adapter("policy", source, config=ADAPTERS["all"])
                check_adapter(worker, trainer)


def test_qwen2_vl_is_bound_and_loads_as_qwen2(tmp_path: Path) -> None:
    """Qwen2-VL's text model is Qwen2.5-VL's under another name."""
    text = {**make_config("Qwen2").to_dict(), "model_type": "qwen2_vl_text"}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [9, 8, 8]}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 200, "num_heads": 2, "patch_size": 4}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()
    model.save_pretrained(tmp_path)
    trainer = bind(model)
    assert_same_bits(alone(trainer, SEQUENCES), alone(as_text(model, "Qwen2"), SEQUENCES))
    with RolloutWorker(tmp_path, config=CHUNK) as worker:
        assert type(worker.module).__name__ == "Qwen2ForCausalLM"
        check(worker, trainer)
        assert worker.receive_weights(trainer, verify=True).changed_tensors == 0


def test_a_cap_that_a_model_with_vision_does_not_read_is_refused(tmp_path: Path) -> None:
    """Gemma-3's text model alone caps its logits where the config says so, and the one with vision does not."""
    model = make_wrapped("Gemma3", final_logit_softcapping=3.0)
    named = r"final_logit_softcapping=3\.0.*that of its text model alone does \(exact: None\)"
    with pytest.raises(BindingError, match=named):
        bind(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=named):
        RolloutWorker(tmp_path)


def set_text(folder: Path, **keys: Any) -> None:
    """Set keys of the text model's config in a folder of one with vision."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(keys)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_text_model_that_is_in_no_other_is_read_as_the_one_that_computes_the_same(tmp_path: Path) -> None:
    """Only what its class reads counts in the text config of a Qwen3-VL: Qwen3, as which a folder loads, reads more."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 80}
    make_wrapped("Qwen3", rope_parameters=rope, rms_norm_eps=1e-3, attention_bias=True).save_pretrained(tmp_path)
    set_text(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=0, eos_token_id=[2, 7])
    trainer = bind(Qwen3VLForConditionalGeneration.from_pretrained(tmp_path))
    with RolloutWorker(tmp_path, config=CHUNK) as worker:
        assert worker.module.config.eos_token_id == [2, 7]
        check(worker, trainer)


@pytest.mark.parametrize("of_text", [False, True])
def test_a_model_that_looks_ahead_is_refused_wherever_its_config_says_it(of_text: bool, tmp_path: Path) -> None:
    make_wrapped("Qwen3").save_pretrained(tmp_path)
    if of_text:
        set_text(tmp_path, is_causal=False)
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(BindingError, match="is_causal=False; exact: True"):
        RolloutWorker(tmp_path)
    with pytest.raises(BindingError, match="is_causal=False; exact: True"):
        bind(Qwen3VLForConditionalGeneration.from_pretrained(tmp_path))


@pytest.mark.parametrize("published", [False, True])
def test_experts_that_a_folder_holds_with_inputs_before_outputs(published: bool, tmp_path: Path) -> None:
    """The experts of a published Qwen3-VL have inputs before outputs, which their shape tells."""
    model = make_wrapped("Qwen3Moe")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    own = {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
    turned = {name: tensor.mT.contiguous() if published else tensor for name, tensor in own.items()}
    save_file({**load_file(path), **turned}, path, metadata={"format": "pt"})
    trainer = bind(type(model).from_pretrained(tmp_path, experts_implementation="eager"))
    assert_same_bits(alone(trainer, SEQUENCES), alone(bind(model), SEQUENCES))
    with RolloutWorker(tmp_path, config=CHUNK) as worker:
        check(worker, trainer)
        assert worker.receive_weights(tmp_path, verify=True).changed_tensors == 0
    with RolloutWorker(halved(trainer), config=CHUNK) as worker:
        worker.receive_weights(tmp_path, verify=True)
        check(worker, bind(model))


def test_a_key_that_another_version_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wrapped("Qwen3").save_pretrained(tmp_path)
    declared = Qwen3VLTextConfig.to_dict
    monkeypatch.setattr(Qwen3VLTextConfig, "to_dict", lambda self: {**declared(self), "query_scale": 2.0})
    with pytest.raises(ModelLoadError, match=r"qwen3_vl_text has query_scale, .* as in a qwen3: give the bound module"):
        RolloutWorker(tmp_path)


def test_one_class_with_vision_around_several_families(tmp_path: Path) -> None:
    """What is in a model with vision says of which family it is; one that is of none is refused."""
    for name in ("Mistral", "Ministral3"):
        model = make_wrapped(name)
        assert type(model) is Mistral3ForConditionalGeneration
        assert binding_of(bind(model)).family.prefix == name
    config = Mistral3Config(text_config=make_config("Llama").to_dict(), **WHOLES["Mistral"][1])
    other = Mistral3ForConditionalGeneration(config)
    with pytest.raises(BindingError, match=r"Mistral3For\w+ can not be bound exactly: it is of no known family"):
        bind(other)
    other.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="can not be loaded: ValueError: Unrecognized configuration class"):
        RolloutWorker(tmp_path)


def test_a_saved_worker_is_a_folder_of_the_text_model(tmp_path: Path) -> None:
    model = make_wrapped("Gemma3", tied=True)
    model.save_pretrained(tmp_path / "whole")
    with RolloutWorker(tmp_path / "whole", config=CHUNK) as worker:
        worker.module.save_pretrained(tmp_path / "text")
    loaded = type(make_model("Gemma3")).from_pretrained(tmp_path / "text")
    assert_same_bits(alone(bind(loaded), SEQUENCES), alone(bind(model), SEQUENCES))


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("Qwen3_5", kind) for kind in ADAPTERS), ("Gemma3", "all"), (GEMMA4, "all"), ("Qwen3", "patterns")],
)
def test_an_adapter_trained_with_vision_is_served_by_the_text_model(name: str, kind: str, tmp_path: Path) -> None:
    model = make_wrapped(name)
    text = as_text(model, name)
    trainer = bind(adapted(model, ADAPTERS[kind]))
    trainer.save_pretrained(tmp_path)
    tensors = get_peft_model_state_dict(trainer)
    with RolloutWorker(text, config=CHUNK) as worker:
        for source in (tmp_path, tensors, WeightStream.of(tensors)):
            worker.load_adapter("policy", source, config=ADAPTERS[kind])
            check_adapter(worker, trainer)
            worker.drop_adapter("policy")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("Qwen3_5", kind) for kind in ADAPTERS), ("Gemma3", "patterns"), (GEMMA4, "all"), ("Qwen3", "all")],
)
def test_an_adapter_of_the_text_model_is_served_with_vision_around(name: str, kind: str) -> None:
    model = make_wrapped(name)
    config = copy.deepcopy(ADAPTERS[kind])
    if kind == "patterns":
        config.target_modules = config.target_modules.replace(r"language_model\.", "")
        for given in ("rank_pattern", "alpha_pattern"):
            patterns = getattr(config, given).items()
            setattr(config, given, {re.sub(r"language_model\\?\.", "", key): value for key, value in patterns})
    trainer = bind(adapted(text_of(model, name), config))
    with RolloutWorker(model, config=CHUNK) as worker:
        worker.load_adapter("policy", get_peft_model_state_dict(trainer), config=config)
        check_adapter(worker, trainer)


@pytest.mark.parametrize(
    ("name", "kind", "tied"),
    [("Qwen3_5", "all", True), ("Qwen3_5", "patterns", False), ("Gemma3", "all", True), ("Qwen3", "names", False)],
)
def test_a_folder_of_an_adapter_trained_with_vision(name: str, kind: str, tied: bool, tmp_path: Path) -> None:
    """A folder of an adapter trained with vision loads its model as text, in a worker and in a check."""
    model = make_wrapped(name, tied=tied)
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    trainer = adapted(model, ADAPTERS[kind])
    trainer.save_pretrained(tmp_path / "adapter")
    with RolloutWorker(tmp_path / "adapter", config=CHUNK) as worker:
        check_adapter(worker, bind(trainer), FEW)
    as_peft = TrainersAdapter.of(make_model(name, tie_word_embeddings=tied), tmp_path / "adapter")
    expected, found = matrices(trainer), matrices(as_peft.model)
    assert {name: torch.equal(tensor, found[name]) for name, tensor in expected.items()} == dict.fromkeys(found, True)


def matrices(trainer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the matrices of an adapter on text, by the names of the text model alone."""
    found = {name.replace(".language_model.", "."): one for name, one in trainer.named_parameters()}
    return {name: one for name, one in found.items() if ".lora_" in name and not VISION.search(name)}


def test_another_model_with_vision_is_another_model() -> None:
    """An adapter with the names of a wrapped model is refused by OLMo-2, which is never wrapped: it was trained on
    another model.
    """
    config = LoraConfig(r=4, target_modules=["q_proj"])
    tensors = get_peft_model_state_dict(get_peft_model(make_model("Olmo2"), config))
    other = {name.replace("model.layers.", "model.language_model.layers."): one for name, one in tensors.items()}
    with RolloutWorker(make_model("Olmo2")) as worker, pytest.raises(WeightMismatchError, match=r"\d unknown: "):
        worker.load_adapter("policy", other, config=config)


@pytest.mark.soak
@pytest.mark.parametrize("name", FOLDERS if CAMPAIGN else ("Qwen3_5", "Gemma3"))
def test_check_and_bench(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapped model passes check and bench. Under `make soak` all rows; otherwise those of the prefix cache and of
    the states.
    """
    if not CAMPAIGN:
        for part in ("weights", "schedules", "temperatures", "layouts"):
            monkeypatch.setattr(audit._Check, part, lambda self: iter(()))
    make_wrapped(name).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--tokens", "4"]) == 0, capsys.readouterr().out
    assert "every bit agrees" in capsys.readouterr().out
    assert main(["bench", str(tmp_path), "--memory"]) == 0
    assert "state of a checkpoint" in capsys.readouterr().out
