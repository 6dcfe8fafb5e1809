"""Families with sparse attention over latents (DSA) are exact by every route, and near Hugging Face; what has no
gradient is known.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from samebit.kernels import BindingError, bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.latent import indexer
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.rollout import AdapterError, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.audit import audit as check
from samebit.rollout.audit.choices import choices_apart
from samebit.rollout.audit.compare import Row

from .compare import assert_cold_and_warm_match_the_trainer, assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, MAX_LEN, SPARSE, bound_model, make_model, paired, token_ids
from .gradients import hugging_face, loss, relative_error
from .layouts import LAYOUTS, alone, assert_same_bits
from .test_layouts import checkpointing

SEQUENCES = token_ids(1, 2, 17, 70, 16)
PARAMS = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
UNTIED = {"index_n_heads": 8}
"""Sets so many heads that there is always one that is positive: no score is 0, and none ties with another."""


@pytest.mark.parametrize(("family", "dtype"), paired(SPARSE, DTYPES))
def test_warm_is_cold_is_trainer(family: str, dtype: torch.dtype) -> None:
    """Rows that are warm have the bits of cold ones and of the trainer, with fewer tokens than are chosen, as many and
    more; scores of 0 tie everywhere.
    """
    model = bound_model(family, dtype)
    with torch.no_grad():
        expected = alone(model, SEQUENCES)
        for layout in ("left padded", "packed", "logits of a left-padded batch"):
            assert_same_bits(LAYOUTS[layout](model, SEQUENCES), expected)
    assert_cold_and_warm_match_the_trainer(model, SEQUENCES, PARAMS)


def choices(model: nn.Module, indexers: list[Any], ids: torch.Tensor) -> list[list[set[int]]]:
    """Return the positions that each indexer chose for each token."""
    found: list[list[set[int]]] = []

    def note(module: nn.Module, args: object, chosen: torch.Tensor) -> None:
        lists = chosen.view(ids.shape[1], -1).tolist()
        found.append([{s for s in row if 0 <= s <= position} for position, row in enumerate(lists)])

    handles = [indexer.register_forward_hook(note) for indexer in indexers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", SPARSE)
def test_near_hugging_face_and_its_choice(family: str) -> None:
    theirs, mine = make_model(family, **UNTIED), bind(make_model(family, **UNTIED))
    with torch.no_grad():
        expected = hugging_face(theirs, SEQUENCES)
        assert relative_error(torch.cat(alone(mine, SEQUENCES)), torch.cat(expected)) < 1e-5
    ids = torch.tensor(token_ids(130))
    layers = [number for number, kind in enumerate(kinds_of(mine)) if kind == "full"]
    found = [
        choices(model, [model.model.layers[number].self_attn.indexer for number in layers], ids)
        for model in (mine, theirs)
    ]
    assert found[0] == found[1]
    assert all(len(row) == min(position + 1, 19) for one in found[0] for position, row in enumerate(one))


def kinds_of(model: Any) -> list[str]:
    return model.config.to_dict().get("indexer_types") or ["full"] * model.config.num_hidden_layers


@pytest.mark.parametrize("top_k", [16, 70, 71, 300])
def test_more_tokens_than_are_chosen_as_many_and_fewer(top_k: int) -> None:
    """Rows of more tokens than are chosen, as many and fewer are exact; where all are chosen, it is dense attention."""
    model = bind(make_model(SPARSE[-1], index_topk=top_k, num_hidden_layers=2))
    outputs, _ = run(model, SEQUENCES, [PARAMS] * 5)
    assert_matches_trainer(model, outputs, [PARAMS] * 5)
    dense = bind(make_model(SPARSE[-1], index_topk=10_000, num_hidden_layers=2))
    with torch.no_grad():
        same = [torch.equal(*pair) for pair in zip(alone(model, SEQUENCES), alone(dense, SEQUENCES), strict=True)]
    assert same == [len(sequence) <= top_k + 1 for sequence in SEQUENCES]


@pytest.mark.parametrize("family", SPARSE)
def test_gradients_near_float64_and_none_of_the_indexer(family: str) -> None:
    changes = {**UNTIED, "mlp_layer_types": ["dense"] * 2, "indexer_types": ["full"] * 2, "num_hidden_layers": 2}
    theirs, mine = make_model(family, **changes).double(), bind(make_model(family, **changes))
    exact = dict(theirs.named_parameters())
    loss(LAYOUTS["left padded"](mine, SEQUENCES)).backward()
    loss(hugging_face(theirs, SEQUENCES)).backward()
    for name, parameter in mine.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None
            assert exact[name].grad is None
        else:
            assert relative_error(parameter.grad, exact[name].grad) < 1e-5, name


def test_the_last_layer_learns_through_the_choice_of_an_earlier_one() -> None:
    """The last layer learns through the choice of an earlier one, under checkpointing too, where a layer that shares a
    choice is computed again.
    """
    model = bind(make_model("GlmMoeDsa", torch.bfloat16))
    found = []
    for reentrant in (None, False, True):
        with nullcontext() if reentrant is None else checkpointing(model, reentrant):
            loss(LAYOUTS["packed"](model, SEQUENCES)).backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
        model.zero_grad()
    assert "model.layers.1.self_attn.kv_b_proj.weight" in found[0]
    assert not any(".indexer." in name for name in found[0])
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], grad) for name, grad in found[0].items())


def test_groups_followers_and_preemption() -> None:
    model = bound_model(SPARSE[0], torch.float32)
    stem, other = token_ids(65, 33, seed=5)
    prompts = [stem, stem, stem[:64], [*stem, *other[:3]], other]
    wanted = [SamplingParams(n=3, max_tokens=30, seed=number, ignore_eos=True) for number in range(5)]
    few = {"num_blocks": 200 // 16, "max_model_len": 128}
    outputs, stats = run(model, prompts, wanted, block_size=16, max_num_seqs=12, max_num_batched_tokens=24, **few)
    assert stats["preemptions"] > 0
    assert stats["prefill_tokens_skipped"] > 0
    assert_matches_trainer(model, outputs, wanted)


def test_updates_and_sleep_in_between() -> None:
    """An update of the indexer alone moves what is read, and no cached index key outlives it."""
    model = bind(make_model(SPARSE[0]))
    prompt = token_ids(50)
    with RolloutWorker(model, config=RolloutConfig(max_model_len=MAX_LEN)) as worker:
        before = worker.generate(prompt, PARAMS)
        with worker.weight_update(), torch.no_grad():
            for layer in model.model.layers:
                if layer.self_attn.indexer is not None:
                    layer.self_attn.indexer.wk.weight.mul_(-1)
        after = worker.generate(prompt, PARAMS)
        assert after[0].num_cached_tokens == 0
        assert after[0].samples[0].logprobs != before[0].samples[0].logprobs
        assert_matches_trainer(model, after, [PARAMS])
        worker.sleep("kv_cache")
        worker.wake_up()
        assert_same_samples(worker.generate(prompt, PARAMS), after)


def test_memory_of_a_token() -> None:
    """A token has index keys beside its latents, in the layers that choose."""
    model = bound_model("GlmMoeDsa", torch.float32)
    layout = binding_of(model).kv_layout
    assert layout.bytes_per_block(1, torch.float32) == 4 * (3 * (50 + 10) + 2 * 27)


def test_the_row_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the check counts no difference on what is bound, and finds a layer that reads another token."""
    make_model(SPARSE[0]).save_pretrained(tmp_path)
    for other in ("schedules", "temperatures", "prefix_cache", "layouts", "routing", "weights"):
        monkeypatch.setattr(check._Check, other, lambda self: iter(()))
    monkeypatch.setattr(check, "LONGEST_PROMPT", 40)

    def row() -> Row:
        rows = {one.name: one for one in check.check_model(tmp_path, new_tokens=4)}
        return rows["selections that differ, module by module, cold and warm"]

    exact = row()
    assert exact.tokens > 10_000
    assert exact.differing == 0
    choose = indexer.choose_keys

    def other(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, context: ForwardContext, options: Any) -> Any:
        return choose(q, k, weights if context.pages is None else weights.flip(1), context, options)

    monkeypatch.setattr(indexer, "choose_keys", other)
    assert 0 < row().differing < exact.tokens / 2


@pytest.mark.parametrize(
    ("chosen", "apart"), [([1, 4, 7], 0), ([1, 4], 1), ([1, 4, 7, 8], 1), ([1, 4, 8], 1), ([1, 7, 4], 2), ([], 3)]
)
def test_a_choice_differs_by_what_either_side_lacks_and_by_order(chosen: list[int], apart: int) -> None:
    assert choices_apart(np.array(chosen, np.int32), np.array([1, 4, 7], np.int32)) == apart


def adapted(model: Any, *targets: str) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False))


def test_adapters_on_the_other_projections() -> None:
    model = bind(adapted(make_model(SPARSE[0]), "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    outputs, _ = run(model, SEQUENCES, [PARAMS] * 5)
    assert_matches_trainer(model, outputs, [PARAMS] * 5)


@pytest.mark.parametrize("family", SPARSE)
def test_an_adapter_that_reaches_an_indexer_is_not_loaded(family: str) -> None:
    """An adapter that reaches an indexer is not loaded: steps in one call would leave it out, and those of modules not,
    so that bits would depend on what is cached.
    """
    said = r"model\.layers\.0\.self_attn\.indexer\.wk.* .exact are .*indexer of sparse attention, which has no gradient"
    with RolloutWorker(make_model(family)) as worker, pytest.raises(AdapterError, match=said):
        worker.load_adapter("policy", {}, config=LoraConfig(r=4, target_modules=["o_proj", "wk"]))


def test_what_is_refused() -> None:
    name = SPARSE[0]
    with pytest.raises(BindingError, match=r"an adapter on model\.layers\.0\.self_attn\.indexer\.wk, .* no gradient"):
        bind(adapted(make_model(name), "wk"))
    with pytest.raises(BindingError, match=r"index_head_dim=9, index_topk=19; allowed: at least 1 head, 10 elements"):
        bind(make_model(name, index_head_dim=9))
    with pytest.raises(BindingError, match=r"index_topk=0; allowed: .* and 1 token"):
        bind(make_model(name, index_topk=0))
    with pytest.raises(BindingError, match=r"indexer_types: 'shared'\), and no layer before it does; allowed: 'full'"):
        bind(make_model("GlmMoeDsa", indexer_types=["shared", "full", "full"]))
    older = make_model("GlmMoeDsa")
    del older.model.layers[0].self_attn.skip_topk
    with pytest.raises(BindingError, match=r"does not know layers that take what an earlier one chooses; 5\.7 and"):
        bind(older)
    for key, found in zip(("rope_interleave", "indexer_rope_interleave"), rotates_neighbours(), strict=True):
        model = make_model("GlmMoeDsa")
        setattr(model.config, key, not found)
        with pytest.raises(BindingError, match=rf"{key}=\w+ of the config asks for rotated .* another model"):
            bind(model)
        setattr(model.config, key, found)
        bind(model)
    model = make_model(name)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(BindingError, match=r"quantized weights \(quantization_config\)"):
        bind(model)


def rotates_neighbours() -> tuple[bool, bool]:
    """Tell whether this transformers' GLM-5 rotates neighbours in attention, and in its indexer: 5.12's only in
    attention.
    """
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

    names = dir(modeling_glm_moe_dsa)
    return "apply_rotary_pos_emb_interleave" in names, "apply_rotary_pos_emb" not in names
