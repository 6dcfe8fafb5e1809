"""A Gemma-4 with vision and audio around it computes text as its text model alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import BindingError, bind
from samebit.rollout import RolloutConfig, RolloutWorker

from .families import make_wrapped, token_ids
from .layouts import alone, assert_same_bits
from .test_wrapped import GEMMA4, add, as_text, bound_whole, check, halved

IDS = torch.tensor(token_ids(20, 20))


@pytest.fixture(scope="module")
def whole() -> PreTrainedModel:
    return bound_whole(GEMMA4)


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_features": torch.zeros(1, 8, 128), "input_features_mask": torch.ones(1, 8)},
        {"image_position_ids": torch.zeros(1, 4, 2)},
        {"video_position_ids": torch.zeros(1, 4, 2)},
        {"num_frames_per_video": torch.ones(1)},
    ],
)
def test_images_and_audio_are_refused_by_name(whole: PreTrainedModel, inputs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{', '.join(inputs)}: .*computes text alone"):
        whole(IDS, **inputs)


def test_inputs_of_layers_are_given_or_looked_up_by_tokens(whole: PreTrainedModel) -> None:
    embeds = whole.model.language_model.embed_tokens(IDS)
    with torch.no_grad():
        expected = whole(IDS).logits
        inputs = whole.model.language_model.get_per_layer_inputs(IDS, None)
        assert torch.equal(whole(inputs_embeds=embeds, per_layer_inputs=inputs).logits, expected)
        assert torch.equal(whole(IDS, logits_to_keep=3).logits, expected[:, -3:])
    with pytest.raises(ValueError, match="inputs_embeds without per_layer_inputs"):
        whole(inputs_embeds=embeds)


def test_tokens_that_stand_for_images_are_looked_up_as_others_are() -> None:
    """The text model alone knows no token that stands for an image; Hugging Face's whole looks up padding for it."""
    model = make_wrapped(GEMMA4)
    token = int(IDS[0, 4])
    model.config.image_token_id = model.config.audio_token_id = token
    assert_same_bits(alone(bind(model), IDS.tolist()), alone(as_text(model, GEMMA4), IDS.tolist()))


def test_a_whole_receives_what_a_folder_of_it_holds(tmp_path: Path) -> None:
    model = bind(make_wrapped(GEMMA4, tied=True))
    model.save_pretrained(tmp_path)
    add(tmp_path, "model.language_model.layers.3.self_attn.k_proj.weight")  # which no layer reads
    with RolloutWorker(make_wrapped(GEMMA4, tied=True), config=RolloutConfig(block_size=64)) as worker:
        for source in (tmp_path, model):
            halved(worker.module)
            worker.receive_weights(source, verify=True)
            check(worker, model)


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    model = make_wrapped("Gemma4", use_bidirectional_attention="all")
    model.save_pretrained(tmp_path)
    named = r"bidirectional attention \(use_bidirectional_attention\)"
    with pytest.raises(BindingError, match=named):
        bind(model)
    with pytest.raises(BindingError, match=named):
        RolloutWorker(tmp_path)
