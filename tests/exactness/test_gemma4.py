"""Gemma 4's own habits are computed as the trainer computes them, or refused by name."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.kv_pages import MixedLayout
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .compare import assert_matches_trainer
from .families import bound_model, make_model, token_ids
from .gradients import assert_equal, gradients, hugging_face, loss, relative_error
from .layouts import LAYOUTS, alone
from .lora import PROJECTIONS, lora_config, make_peft

SEQUENCES = token_ids(3, 70, 16)
PARAMS = SamplingParams(n=2, max_tokens=9, seed=3, ignore_eos=True)
SHARED, EXPERTS = "Gemma4, inputs of layers, shared keys", "Gemma4, experts"
ALL = ("Gemma4", SHARED, EXPERTS)
LOCAL, GLOBAL = "sliding_attention", "full_attention"

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention to later tokens": ("Gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "global heads without keys": (
        "Gemma4",
        {"num_global_key_value_heads": 3},
        r"layers\.1\.self_attn has num_attention_heads=4, no multiple of its 3 heads of keys",
    ),
    "an odd local head": ("Gemma4", {"head_dim": 21}, "of heads of 21 elements 21 are rotated, an odd number"),
    "an odd global head": ("Gemma4", {"global_head_dim": 29}, "14 frequencies.*here heads have 29"),
    "keys of no layer": (SHARED, {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 of num_hidden_layers=5"),
    "keys of no layer of the type": (
        SHARED,
        {"layer_types": [*[GLOBAL] * 3, LOCAL, GLOBAL]},
        "the last 2 layers .* none of type 'sliding_attention'|layer types producing a cache",  # of newer transformers
    ),
    "tokens without inputs of layers": (
        SHARED,
        {"vocab_size_per_layer_input": 500},
        r"embed_tokens_per_layer knows 500 tokens .* there are 1009",
    ),
    "more choices than experts": (EXPERTS, {"top_k_experts": 8}, r"layers\.0\.router: 8 experts are chosen of 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused_by_name(case: str) -> None:
    family, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        bind(make_model(family, **changes))


def test_experts_of_other_processes_are_refused() -> None:
    model = make_model(EXPERTS)
    model.model.layers[1].experts._is_expert_parallel = True
    with pytest.raises(BindingError, match=r"layers\.1\.experts holds 7 of 7 experts, as a part"):
        bind(model)


def test_pages_are_those_of_layers_with_keys_each_of_its_heads() -> None:
    heads = {"Gemma4": ((2, 20), (1, 28), (1, 28)), SHARED: ((2, 20), (2, 20), (2, 28))}
    for family, expected in heads.items():
        layout = binding_of(bound_model(family)).kv_layout
        assert layout == MixedLayout(expected)
        pages = layout.allocate(3, 16, torch.bfloat16)
        assert [tuple(part.shape) for part in pages] == [(4, count, 2, size * 16) for count, size in expected]
        assert layout.bytes_per_block(16, torch.bfloat16) == sum(part[0].nbytes for part in pages)


@pytest.mark.parametrize("family", ALL)
def test_checkpointing_changes_no_bit(family: str) -> None:
    model = bind(make_model(family))
    expected = gradients(model, LAYOUTS["packed"], SEQUENCES)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert_equal(gradients(model, LAYOUTS["packed"], SEQUENCES), expected)


@pytest.mark.parametrize("kept", [False, True])
def test_a_checkpointed_forward_without_a_backward_is_freed(kept: bool) -> None:
    """The dictionary of shared keys is in no circle with their graph, whether the loss is dropped or differentiated."""
    model = bind(make_model(SHARED))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    given: list[weakref.ref[Any]] = []

    def note(_module: nn.Module, _arguments: Any, keywords: dict[str, Any]) -> None:
        given.append(weakref.ref(keywords["shared_kv_states"]))

    model.get_submodule("model.layers.4.self_attn").register_forward_pre_hook(note, with_kwargs=True)
    found = loss(LAYOUTS["packed"](model, SEQUENCES))
    if kept:
        found.backward()
    del found
    gc.collect()
    assert given
    assert [one() for one in given] == [None] * len(given)


def test_checkpointing_that_loses_gradients_of_shared_keys_is_refused() -> None:
    model = bind(make_model(SHARED))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    found = loss(LAYOUTS["packed"](model, SEQUENCES))
    with pytest.raises(ValueError, match=r'num_kv_shared_layers.*"use_reentrant": False'):
        found.backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shared_kv_states": {}}, r"no Hugging Face cache \(shared_kv_states\)"),
        ({"return_shared_kv_states": True}, "return_shared_kv_states=True"),
    ],
)
def test_keys_that_go_from_call_to_call_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bound_model(SHARED)(torch.tensor(SEQUENCES[:1]), **arguments)


def test_inputs_of_layers_are_given_or_looked_up_by_tokens() -> None:
    model = bound_model(SHARED)
    ids = torch.tensor(SEQUENCES[1:2])
    embeds = model.model.embed_tokens(ids)
    with torch.no_grad():
        expected = model(ids).logits
        inputs = model.model.get_per_layer_inputs(ids, None)
        assert torch.equal(model(inputs_embeds=embeds, per_layer_inputs=inputs).logits, expected)
    with pytest.raises(ValueError, match="inputs_embeds without per_layer_inputs"):
        model(inputs_embeds=embeds)


@pytest.mark.parametrize("family", ALL)
def test_updates_reach_all_that_a_state_dict_has(family: str, tmp_path: Path) -> None:
    """A state dict, and a folder, which may hold keys of layers that read those of others, as published ones do."""
    model, changed = bind(make_model(family)), bind(make_model(family))
    with torch.no_grad():
        for tensor in (*changed.parameters(), *(layer.layer_scalar for layer in changed.model.layers)):
            tensor.mul_(1.0625)
    changed.save_pretrained(tmp_path)
    if family == SHARED:
        (file,) = tmp_path.glob("*.safetensors")
        unread = {f"model.layers.3.self_attn.{name}.weight": torch.ones(28) for name in ("k_proj", "v_proj", "k_norm")}
        save_file({**load_file(file), **unread}, file, metadata={"format": "pt"})
    with RolloutWorker(model, config=RolloutConfig(block_size=16)) as worker:
        worker.generate(SEQUENCES, PARAMS)
        for source in (changed.state_dict(), tmp_path):
            model.load_state_dict(make_model(family).state_dict())
            worker.receive_weights(source)
            assert_matches_trainer(changed, worker.generate(SEQUENCES, PARAMS), [PARAMS] * len(SEQUENCES))


def test_experts_that_were_chosen_are_noted() -> None:
    model = bound_model(EXPERTS)
    asked = SamplingParams(max_tokens=5, seed=1, ignore_eos=True, return_routed_experts=True)
    with RolloutWorker(model) as worker:
        (out,) = worker.generate(SEQUENCES[1:2], asked)
    chosen = out.samples[0].routed_experts
    assert chosen is not None
    assert chosen.shape == (74, 3, 3)
    hooked: list[torch.Tensor] = []
    handles = [
        layer.router.register_forward_hook(lambda _module, _args, result: hooked.append(result[2]))
        for layer in model.model.layers
    ]
    token_logprobs(model, torch.tensor([[*SEQUENCES[1], *out.samples[0].token_ids]]))
    for handle in handles:
        handle.remove()
    assert torch.equal(torch.stack(hooked, dim=1)[:74].short(), torch.from_numpy(chosen))


def test_adapters_reach_what_layers_call_themselves() -> None:
    of_inputs = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
    names = [*PROJECTIONS[:4], "gate_proj", *of_inputs]
    model, oracle = (make_peft(SHARED, config=lora_config(target_modules=names)) for _ in range(2))
    bind(model)
    with torch.no_grad():
        found, exact = alone(model, SEQUENCES), hugging_face(oracle.double(), SEQUENCES)
    assert relative_error(torch.cat(found), torch.cat(exact)) < 5e-7
    with RolloutWorker(model, config=RolloutConfig(block_size=16)) as worker:
        assert_matches_trainer(model, worker.generate(SEQUENCES, PARAMS), [PARAMS] * len(SEQUENCES))


def test_an_adapter_on_a_router_is_refused() -> None:
    with pytest.raises(BindingError, match=r"layers\.0\.router\.proj is a Linear, exact is one of torch"):
        bind(make_peft(EXPERTS, config=lora_config(target_modules=["router.proj"])))
