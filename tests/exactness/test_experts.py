"""The worker has the trainer's bits where routers find it hard; and what else is special in routed experts is exact."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridPreTrainedModel

from samebit.kernels import bind, token_logprobs
from samebit.kernels.binding.binding import binding_of
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .compare import assert_matches_trainer, run, tokens_of
from .families import CAMPAIGN, DTYPES, EXPERTS, bound_model, cast, make_model, token_ids
from .gradients import assert_equal, gradients, hugging_face, loss, take_gradients
from .layouts import LAYOUTS, alone, assert_same_bits
from .test_layouts import checkpointing, detached

GRANITE_RECORDER = GraniteMoeHybridPreTrainedModel._can_record_outputs.get("router_logits")
"""Says which result of the router is recorded: none before transformers 5.18, then the last, from 5.21 on the first."""
SEQUENCES = token_ids(65, 2, 40, 1)
OTHERS = token_ids(17, 50, 3, seed=1)
STEM = token_ids(90, seed=2)[0]
PROMPTS = [STEM, STEM[:70], [*STEM[:66], *SEQUENCES[2]], SEQUENCES[1]]
PARAMS = [
    SamplingParams(n=n, temperature=temperature, seed=seed, max_tokens=12, ignore_eos=True)
    for seed, (n, temperature) in enumerate([(3, 1.0), (1, 0.7), (1, 0.0), (2, 1.0)])
]
TIGHT = {"max_num_batched_tokens": 40, "max_num_seqs": 6, "num_blocks": 12, "block_size": 16}


def routers(model: nn.Module) -> list[Any]:
    """Return the routers of all layers, in their order."""
    return [part for name, part in model.named_modules() if name.endswith((".gate", ".router")) and name.count(".") < 6]


@contextmanager
def recorded_ids(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Record what the routers choose meanwhile."""
    found: list[torch.Tensor] = []
    handles = [router.register_forward_hook(lambda _, given, out: found.append(out[2])) for router in routers(model)]
    yield found
    for handle in handles:
        handle.remove()


def assert_exact(model: PreTrainedModel) -> None:
    """Check exactness through chunks, hits, preemptions and groups, and in layouts of the trainer."""
    with torch.no_grad():
        expected = alone(model, SEQUENCES, 0.7)
        for layout in ("left padded", "packed", "two micro-batches"):
            assert_same_bits(LAYOUTS[layout](model, SEQUENCES, 0.7), expected)
    hybrid = binding_of(model).state_layout is not None
    outputs, stats = run(model, PROMPTS, PARAMS, **{**TIGHT, "block_size": 64 if hybrid else 16})
    assert assert_matches_trainer(model, outputs, PARAMS) == 7 * 12
    assert stats["prefill_tokens_skipped"] > 0
    assert stats["preemptions"] > 0 or hybrid


def equal_rows(model: nn.Module) -> None:
    """Make logits equal: all of them in the first block, and pairs of them in the last."""
    first, *_, last = routers(model)
    first.weight.zero_()
    last.weight[1::2] = last.weight[0 : len(last.weight) - 1 : 2]
    for router in routers(model):
        for correction in router.buffers():
            correction.zero_()


def all_to_one(model: nn.Module) -> None:
    """Let every row take the last expert, and nobody the second."""
    for router in routers(model):
        if "bias" in dict(router.named_parameters()):
            router.bias[-1], router.bias[1] = 1e3, -1e3
        else:
            router.e_score_correction_bias[-1], router.e_score_correction_bias[1] = 100.0, -100.0


HARD: dict[str, tuple[str, dict[str, Any], Callable[[nn.Module], None] | None]] = {
    "one expert a row": ("Qwen3Moe", {"num_experts_per_tok": 1}, None),
    "all experts": ("Mixtral", {"num_experts_per_tok": 3}, None),
    "one expert": ("Mixtral", {"num_experts_per_tok": 1, "num_local_experts": 1}, None),
    "weights that do not add up to one": ("Qwen3Moe", {"norm_topk_prob": False}, None),
    "ties": ("Qwen3Moe", {}, equal_rows),
    "ties among groups": ("Glm4Moe", {"first_k_dense_replace": 0}, equal_rows),
    "all rows to one expert": ("GptOss", {}, all_to_one),
    "all rows to one expert of a group": ("Glm4Moe", {"topk_group": 1}, all_to_one),
    "experts without latents": ("NemotronH, experts", {"moe_latent_size": None}, None),
    "no dense layer": ("Glm4Moe", {"first_k_dense_replace": 0, "use_qk_norm": False}, None),
    "every other layer": ("Qwen3Moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}, None),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_choices(name: str) -> None:
    family, changes, change = HARD[name]
    model = bind(make_model(family, DTYPES[len(name) % 2], **changes))
    if change is not None:
        with torch.no_grad():
            change(model)
    assert_exact(model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["Qwen3Moe", "NemotronH, experts"])
def test_recomputation_chooses_the_same_experts(family: str, reentrant: bool) -> None:
    """Recomputation chooses the same experts, also when another micro-batch has been computed meanwhile."""
    model, packed = bind(make_model(family, torch.bfloat16)), LAYOUTS["packed"]
    with torch.no_grad():
        equal_rows(model)
    expected = gradients(model, packed, SEQUENCES, OTHERS)
    with checkpointing(model, reentrant), recorded_ids(model) as ids:
        losses = [loss(packed(model, batch)) for batch in (SEQUENCES, OTHERS)]
        forward = [*ids]
        for each in losses:
            each.backward()
    blocks = len(routers(model))
    again = ids[len(forward) :]
    assert len(again) == len(forward) == 2 * blocks
    for batch in range(2):
        mine = forward[batch * blocks : (batch + 1) * blocks]
        for one, other in zip(mine, reversed(again[batch * blocks : (batch + 1) * blocks]), strict=True):
            assert torch.equal(one, other)
    assert_equal(take_gradients(model), expected)


def test_a_tie_goes_to_the_lowest_expert_and_ids_ascend() -> None:
    model = bind(make_model("Qwen3Moe"))
    with torch.no_grad():
        equal_rows(model)
        with recorded_ids(model) as ids:
            alone(model, SEQUENCES[:1])
    assert torch.equal(ids[0], torch.arange(4, dtype=torch.int32).expand(65, 4))
    assert (ids[-1].diff(dim=1) > 0).all()
    halves = ids[-1] // 2
    odd_alone = (ids[-1] % 2 == 1) & ((halves[:, None] == halves[:, :, None]).sum(-1) == 1)
    assert not odd_alone.any(), "of two equal experts the second without the first"


@pytest.mark.soak
@pytest.mark.parametrize("name", EXPERTS if CAMPAIGN else ("Qwen3Moe", "GptOss"))
def test_bfloat16_is_no_farther_from_float64_than_hugging_face(name: str) -> None:
    """The mean over many tokens is no farther from float64 in bfloat16 than Hugging Face's: each rounds other rows to
    another expert.
    """
    sequences = token_ids(*[29] * (35 if CAMPAIGN else 12), seed=5)
    with torch.no_grad():
        exact = torch.cat(hugging_face(make_model(name, torch.bfloat16).double(), sequences))
        theirs = torch.cat(hugging_face(make_model(name, torch.bfloat16), sequences))
        mine = torch.cat(LAYOUTS["packed"](bound_model(name, torch.bfloat16), sequences))
    errors = [float((found.double() - exact).abs().mean()) for found in (mine, theirs)]
    assert errors[0] <= errors[1]


def test_norms_that_stay_in_float32() -> None:
    """Norms may stay in float32, as gpt-oss has them where its weights are float16 or dequantized."""

    def of_float32_norms(model: PreTrainedModel) -> PreTrainedModel:
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.float()
        return model

    model = bind(of_float32_norms(make_model("GptOss", torch.bfloat16)))
    assert_exact(model)
    with torch.no_grad():
        exact = torch.cat(hugging_face(make_model("GptOss", torch.bfloat16).double(), SEQUENCES))
        found = torch.cat(LAYOUTS["packed"](model, SEQUENCES))
    assert float((found.double() - exact).abs().mean()) < 0.05


def test_a_balanced_router_and_weights_of_an_optimizer_arrive_by_an_update() -> None:
    policy = make_model("Glm4Moe", torch.bfloat16)
    with RolloutWorker(policy, config=RolloutConfig(**TIGHT)) as worker:
        before = None
        for step in range(2):
            outputs = worker.generate(PROMPTS, PARAMS)
            assert_matches_trainer(policy, outputs, PARAMS)
            assert tokens_of(outputs) != before
            before = tokens_of(outputs)
            torch.cat(alone(policy, SEQUENCES[:1])).mean().neg().backward()
            with worker.weight_update(), torch.no_grad():
                for router in routers(policy):
                    router.e_score_correction_bias[step] += 0.5
                for parameter in policy.parameters():
                    parameter -= 0.05 * parameter.grad
                policy.zero_grad()
        worker.sleep("kv_cache")
        worker.wake_up()
        assert_matches_trainer(policy, worker.generate(PROMPTS, PARAMS), PARAMS)


def test_a_correction_that_is_rounded_later_is_named() -> None:
    model = bind(make_model("Glm4Moe")).to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"correction is torch\.bfloat16; allowed: torch\.float32"):
        token_logprobs(model, torch.tensor(SEQUENCES[:1]))
    assert_exact(cast(bind(make_model("Glm4Moe")), torch.bfloat16))


@pytest.mark.parametrize("where", ["config", "argument"])
@pytest.mark.parametrize(
    "family",
    [
        "Qwen3Moe",
        pytest.param(
            "GraniteMoeHybrid, experts",
            marks=pytest.mark.skipif(GRANITE_RECORDER is None, reason="transformers 5.18 and later record its logits"),
        ),
    ],
)
def test_a_loss_of_the_routers_is_the_own_forwards_alone(family: str, where: str) -> None:
    model = bind(make_model(family))
    ids, theirs = torch.tensor(SEQUENCES[:1]), make_model(family)
    asked = {"output_router_logits": True} if where == "argument" else {}
    if where == "config":
        model.config.output_router_logits = theirs.config.output_router_logits = True
    mine, expected = (each(ids, labels=ids, **asked) for each in (model, theirs))
    assert len(mine.router_logits) == len(expected.router_logits) == len(routers(model))
    assert [logits.shape for logits in mine.router_logits] == [logits.shape for logits in expected.router_logits]
    assert torch.allclose(mine.aux_loss, expected.aux_loss, rtol=1e-5)
    assert torch.allclose(mine.loss, expected.loss, rtol=1e-5)
    mine.loss.backward()
    if where == "config":
        with pytest.raises(ValueError, match=r"output_router_logits=True.*config\.output_router_logits = False"):
            token_logprobs(model, ids)
        model.config.output_router_logits = False
    assert token_logprobs(model, ids).isfinite().all()


@pytest.mark.parametrize(
    ("family", "logits"),
    [("Qwen3Moe", 0), ("GraniteMoeHybrid, experts", -1 if GRANITE_RECORDER is None else GRANITE_RECORDER.index)],
)
def test_a_router_gives_logits_where_its_class_does(family: str, logits: int) -> None:
    found: list[torch.Tensor] = []
    for model in (bind(make_model(family)), make_model(family)):
        routers(model)[0].register_forward_hook(lambda _, given, out: found.append(out[logits]))
        with torch.no_grad():
            model(torch.tensor(SEQUENCES[:1]), use_cache=False)
    assert torch.allclose(*found, atol=1e-5)


def test_hooks_of_routers_and_experts_run() -> None:
    model = bound_model("Qwen3Moe")
    assert len(routers(model)) == 2
    with torch.no_grad(), recorded_ids(model) as ids:
        alone(model, SEQUENCES[:1])
    assert [tuple(each.shape) for each in ids] == [(65, 4)] * 2


def test_without_exactness_the_blocks_are_hugging_faces() -> None:
    model = bind(make_model("Qwen3Moe"), exact=False)
    block = model.model.layers[0].mlp
    assert "forward" not in {*vars(block), *vars(block.gate), *vars(block.experts)}
    assert inspect.ismethod(model.model.layers[0].self_attn.forward)
    found, expected = alone(model, SEQUENCES[:1]), alone(bound_model("Qwen3Moe"), SEQUENCES[:1])
    assert torch.allclose(*detached([*found, *expected]), atol=1e-4)
