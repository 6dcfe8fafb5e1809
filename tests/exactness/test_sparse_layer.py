"""A decoder layer of sparse attention that a rollout computes in one call has the bits of its modules, chooses the same
tokens, and gives way to who listens."""

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.layers import latent as latent_layer
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import CAMPAIGN, DTYPES, SPARSE, bound_model, make_model, paired, token_ids
from .listening import listening, one_by_one
from .lora import PROJECTIONS, lora_config, make_peft

pytestmark = pytest.mark.usefixtures("rooms_with_an_end")

PROMPTS = token_ids(1, 3, 16, 65, 130)
PARAMS = [
    SamplingParams(n=n, seed=n, max_tokens=new, ignore_eos=True)
    for n, new in ((1, 16), (2, 12), (2, 12), (5, 12), (9, 8))
]


@pytest.fixture
def layers_in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """List for each layer that was computed in one call whether it had chosen itself, and how many tokens for a row."""
    calls: list[tuple[bool, int]] = []
    prepare = latent_layer.sparse_call

    def counted(*arguments: object) -> object:
        call = prepare(*arguments)  # type: ignore[arg-type]
        if call is not None and call.chosen is not None:
            calls.append((call.chosen is not arguments[-1], call.chosen.shape[1]))
        return call

    monkeypatch.setattr(latent_layer, "sparse_call", counted)
    return calls


@pytest.mark.parametrize(("family", "dtype"), paired(SPARSE, DTYPES))
def test_one_call_gives_the_bits_of_the_modules(
    family: str, dtype: torch.dtype, layers_in_one_call: list[tuple[bool, int]]
) -> None:
    model = bound_model(family, dtype)
    at_once, _ = run(model, PROMPTS, PARAMS)
    widths = {width for _, width in layers_in_one_call}
    assert len(widths) == 2  # steps whose rows read all tokens, and others
    assert 0 in widths
    assert_matches_trainer(model, at_once, PARAMS)
    layers_in_one_call.clear()
    attentions = [f"model.layers.{number}.self_attn" for number in range(len(model.model.layers))]
    again = one_by_one(model, PROMPTS, PARAMS, *attentions)
    assert not layers_in_one_call
    assert_same_samples(again, at_once)


def test_layers_that_share_a_choice_and_weights_of_heads_in_float32(
    layers_in_one_call: list[tuple[bool, int]],
) -> None:
    model = make_model(
        "GlmMoeDsa", torch.bfloat16, num_hidden_layers=3, indexer_types=["full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "dense"], index_topk=7,
    )  # fmt: skip
    model.model.layers[0].self_attn.indexer.weights_proj.float()
    samples, _ = run(bind(model), PROMPTS, PARAMS)
    assert {chooses for chooses, _ in layers_in_one_call} == {True, False}
    assert_matches_trainer(model, samples, PARAMS)


@pytest.mark.parametrize("name", ["indexer", "indexer.wq_b", "indexer.k_norm", "indexer.weights_proj", "q_b_proj"])
def test_who_listens_to_a_part_of_a_layer_hears_each_call(
    name: str, layers_in_one_call: list[tuple[bool, int]]
) -> None:
    """Who listens to a part of a layer hears each call; the next layer reads, in one call, what this one has chosen
    module by module.
    """
    model = bound_model("GlmMoeDsa")
    at_once, _ = run(model, PROMPTS[-1:], PARAMS[:1])
    count = len(layers_in_one_call) // len(model.model.layers)
    layers_in_one_call.clear()
    heard: list[str] = []
    with listening(model, heard, f"model.layers.0.self_attn.{name}"):
        again, _ = run(model, PROMPTS[-1:], PARAMS[:1])
    assert len(heard) == count
    assert len(layers_in_one_call) == (len(model.model.layers) - 1) * count
    assert_same_samples(again, at_once)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES if CAMPAIGN else DTYPES[:1])
def test_one_call_adds_an_adapter_as_the_modules_do(
    dtype: torch.dtype, layers_in_one_call: list[tuple[bool, int]]
) -> None:
    model = bind(make_peft("GlmMoeDsa", dtype, lora_config(5, target_modules=[*PROJECTIONS])))
    samples, _ = run(model, PROMPTS, PARAMS)
    assert layers_in_one_call
    assert_matches_trainer(model, samples, PARAMS)


def test_a_call_that_is_found_again_sees_what_changed_meanwhile(layers_in_one_call: list[tuple[bool, int]]) -> None:
    """A call that is found again sees weights of an indexer, of other numbers that nobody was told of, and another
    tensor.
    """
    model = make_model("GlmMoeDsa")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = iter(token_ids(*[50] * 3, seed=9))
    with RolloutWorker(model, config=RolloutConfig(num_blocks=32, max_num_seqs=4, max_model_len=128)) as worker:
        worker.generate([next(prompts)], params)
        indexer = model.model.layers[0].self_attn.indexer
        indexer.wk.weight.data = -indexer.wk.weight.data
        assert_matches_trainer(model, worker.generate([next(prompts)], params), [params])
        indexer.weights_proj.weight = nn.Parameter(-indexer.weights_proj.weight.detach())
        assert_matches_trainer(model, worker.generate([next(prompts)], params), [params])
    assert layers_in_one_call
