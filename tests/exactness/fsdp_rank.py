"""Run as one rank of an FSDP2 group, which test_fsdp.py forks: any difference raises.

Per case: a bound model, sharded as trainers shard it (every layer, an untied embedding and head, the root), gives
the log-probabilities and, in float32, the gradients of the same model in one piece in the dtype that is computed in.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from samebit.kernels import bind, token_logprobs
from samebit.kernels.binding import causal_lm as bound_causal
from samebit.kernels.binding.trainer import logprob_head as scored_head
from samebit.weight_sync import WeightStream, apply_weights

CONFIG: dict[str, Any] = {
    "vocab_size": 1009,
    "hidden_size": 100,
    "intermediate_size": 129,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 320,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 36,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 6,
    "v_head_dim": 24,
}
"""Sets experts and latent attention, whose ``kv_b_proj`` is called for each half of its weight."""
SPARSE: dict[str, Any] = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "indexer_types": ["full", "shared", "full"],
    "q_lora_rank": 41,
    "index_topk": 19,
    "index_head_dim": 27,
    "index_n_heads": 3,
}
"""Sets layers of which a choice goes from one sharded layer to the next; an indexer's parameters are gathered and have
no gradient.
"""

IMAGE, GRIDS = 1008, ((1, 4, 6), (1, 6, 10))
"""The placeholder, and the patches of two images: each four of them are a token."""
VISION: dict[str, Any] = {
    **{"hidden_size": 60, "num_heads": 3, "depth": 2, "intermediate_size": 50, "out_hidden_size": 100},
    **{"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
}
LENGTHS = (1, 7, 130)
ROWS_AT_ONCE = 30
"""Is the number of rows of the head that are computed at once: fewer than there are."""


def build(kind: str, *, tied: bool, device: str = "cpu") -> PreTrainedModel:
    """Make a model of a kind: "dense", "experts" (and latent attention) or "sparse" (attention over latents)."""
    torch.manual_seed(3)
    with torch.device(device):
        if kind == "dense":
            return Qwen3ForCausalLM(Qwen3Config(**CONFIG, tie_word_embeddings=tied))
        shape = {**CONFIG, **(SPARSE if kind == "sparse" else EXPERTS), "tie_word_embeddings": tied}
        del shape["head_dim"]  # the class's own: that of the rotated part
        model: Any
        if kind == "sparse":
            model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**shape))
        else:
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**shape))
        model.model.layers[1].mlp.gate.e_score_correction_bias.normal_(std=0.1)
        return model


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast parameters alone, as FSDP2 does."""
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype)
    return model


def batch() -> dict[str, torch.Tensor]:
    """Return sequences of `LENGTHS`, padded on the right."""
    torch.manual_seed(5)
    width = max(LENGTHS)
    mask = (torch.arange(width)[None, :] < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": torch.randint(CONFIG["vocab_size"], mask.shape) * mask, "attention_mask": mask}


def build_with_images() -> PreTrainedModel:
    """Make a model with a vision tower."""
    torch.manual_seed(3)
    text = {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=VISION, image_token_id=IMAGE)
    ).eval()


def batch_with_images() -> dict[str, torch.Tensor]:
    """Return a sequence with two images."""
    torch.manual_seed(5)
    ids: list[int] = []
    for _, height, width in GRIDS:
        ids += [*torch.randint(IMAGE, (5,)).tolist(), *[IMAGE] * (height * width // 4)]
    patches = sum(height * width for _, height, width in GRIDS)
    return {
        "input_ids": torch.tensor([[*ids, 7, 8, 9]]),
        "pixel_values": torch.randn(patches, 96),
        "image_grid_thw": torch.tensor(GRIDS),
    }


def shard(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype, returned: torch.dtype | None = None) -> None:
    policy = MixedPrecisionPolicy(dtype, torch.float32, returned, cast_forward_inputs=True)
    units: list[nn.Module] = list(model.model.layers)
    if not model.config.tie_word_embeddings:
        units += [model.model.embed_tokens, model.lm_head]
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def sharded(mesh: DeviceMesh, dtype: torch.dtype, kind: str, *, tied: bool, checkpointing: bool) -> PreTrainedModel:
    """Return a sharded model, bound before its weights are there on the ranks that do not load them."""
    whole = build(kind, tied=tied)
    model = build(kind, tied=tied, device="cpu" if tied or dist.get_rank() == 0 else "meta")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    bind(model)
    shard(model, mesh, dtype)
    if dist.get_rank() != 0:
        model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict(), options=options)
    return model.train()


def check(mesh: DeviceMesh, dtype: torch.dtype, kind: str, *, tied: bool, checkpointing: bool) -> None:
    whole = bind(cast(build(kind, tied=tied), dtype))
    model = sharded(mesh, dtype, kind, tied=tied, checkpointing=checkpointing)
    assert bind(model) is model, "the classes are FSDP2's now, and that is legal"
    inputs = batch()
    expected = token_logprobs(whole, **inputs, temperature=0.7)
    got = token_logprobs(model, **inputs, temperature=0.7)
    assert torch.equal(got, expected), (got - expected).abs().max()
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, **inputs, temperature=0.7), expected)
    expected.sum().backward()
    got.sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        if ".indexer." in name:
            assert ours.grad is None, name
            assert theirs.grad is None, name
            continue
        mine = ours.grad.full_tensor()
        assert mine.dtype == torch.float32, name
        if dtype == torch.float32 and dist.get_world_size() == 1:
            assert torch.equal(mine, theirs.grad), name
        else:  # each rank adds its own, rounded
            near = torch.nn.functional.cosine_similarity(mine.flatten(), theirs.grad.float().flatten(), dim=0)
            assert near > 0.999, (name, near)


def check_update(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Check that a correction bias that a trainer changed reaches a receiver in float32, with experts that no two ranks
    have equally many of; then the receiver has the trainer's bits.
    """
    model = sharded(mesh, dtype, "experts", tied=False, checkpointing=False)
    receiver = bind(cast(build("experts", tied=False), dtype))
    mlp, inputs = model.model.layers[1].mlp, batch()
    held = [len(one) for one in torch.arange(EXPERTS["n_routed_experts"]).chunk(dist.get_world_size())]
    assert len(mlp.experts.down_proj.to_local()) == held[dist.get_rank()]
    bias = mlp.gate.e_score_correction_bias
    with torch.no_grad():
        before = token_logprobs(receiver, **inputs)
        bias += torch.linspace(-0.3, 0.3, len(bias))
        assert not torch.equal(bias.to(dtype).float(), bias) or dtype == torch.float32
        report = apply_weights(receiver, WeightStream.of(model, dtype=dtype), verify=True)
        assert report.changed == ("model.layers.1.mlp.gate.e_score_correction_bias",)
        arrived = receiver.model.layers[1].mlp.gate.e_score_correction_bias
        assert arrived.dtype == torch.float32
        assert torch.equal(arrived, bias)
        after = token_logprobs(receiver, **inputs)
        assert torch.equal(after, token_logprobs(model, **inputs))
        assert not torch.equal(after, before)


def check_nothing_to_score(mesh: DeviceMesh) -> None:
    """Check that where only the first rank has something to score, the others take part in its collectives, and add
    nothing.
    """
    whole = bind(build("experts", tied=False))
    model = sharded(mesh, torch.float32, "experts", tied=False, checkpointing=False)
    inputs = batch()
    expected = token_logprobs(whole, **inputs)
    expected.sum().backward()
    if dist.get_rank() > 0:
        inputs = {"input_ids": torch.tensor([[5], [6]])}
        expected = torch.zeros(2, 0)
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, **inputs), expected)
    got = token_logprobs(model, **inputs)
    assert torch.equal(got, expected)
    got.sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad / dist.get_world_size()), name


def check_results_that_are_cast(mesh: DeviceMesh) -> None:
    """Check that results that FSDP2 casts, as Accelerate has it do with mixed precision, are refused."""
    model = bind(build("dense", tied=False))
    shard(model, mesh, torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"log_probs came out of the model as torch.bfloat16, rounded: FSDP2"):
        token_logprobs(model, **batch())


def check_images(mesh: DeviceMesh) -> None:
    """Check a tower of blocks that are sharded each, with what FSDP2 casts to bfloat16 on its way to them, and that
    another model receives it.
    """
    whole, model = (bind(cast(build_with_images(), dtype)) for dtype in (torch.bfloat16, torch.float32))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    parts = (*model.model.language_model.layers, *model.model.visual.blocks, model)
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    inputs = batch_with_images()
    expected, got = (token_logprobs(one, **inputs) for one in (whole, model))
    assert torch.equal(got, expected), (got - expected).abs().max()
    for scores in (expected, got):
        scores.sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        mine = ours.grad.full_tensor()
        near = torch.nn.functional.cosine_similarity(mine.flatten(), theirs.grad.float().flatten(), dim=0)
        assert near > 0.999, (name, near)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.fill_(0.5)
        report = apply_weights(whole, WeightStream.of(model, dtype=torch.bfloat16), verify=True)
        assert report.changed == tuple(name for name, _ in whole.named_parameters())
        assert torch.equal(token_logprobs(whole, **inputs), expected)


def main(rank: int, folder: str, ranks: str, every: str) -> None:
    """Check all cases where `every` is "True". Otherwise check those of a dense model in which any two options meet in
    each way, and one each of the models with experts; `check_update` has another.
    """
    world = int(ranks)
    store = dist.FileStore(f"{folder}/store", world)
    scored_head.BYTES_AT_ONCE = 4 * CONFIG["vocab_size"] * ROWS_AT_ONCE
    bound_causal.logprobs_from_logits = None  # of all logits at once, which is not to happen
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=900))
    mesh = dist.init_device_mesh("cpu", (world,))
    for dtype, tied, checkpointing in product((torch.float32, torch.bfloat16), (True, False), (True, False)):
        if every == "True" or (dtype == torch.float32) ^ tied ^ checkpointing:
            check(mesh, dtype, "dense", tied=tied, checkpointing=checkpointing)
    for dtype, checkpointing in ((torch.float32, False), (torch.bfloat16, True)):
        for kind in ("experts", "sparse"):
            if every == "True" or checkpointing == (kind == "sparse"):
                check(mesh, dtype, kind, tied=False, checkpointing=checkpointing)
    check_nothing_to_score(mesh)
    check_update(mesh, torch.bfloat16)
    check_results_that_are_cast(mesh)
    check_images(mesh)
    dist.destroy_process_group()
    sys.stdout.write("all went well\n")
