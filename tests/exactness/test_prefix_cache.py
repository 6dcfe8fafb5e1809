"""A cache hit changes no bit: what is warm, shared, forked or evicted equals what is computed cold, and the trainer."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

from ..campaign import in_pairs
from ..patience import HANG
from .compare import assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, bound_model, make_model, paired, token_ids
from .layouts import assert_same_bits

FAMILIES = ("Qwen3", "Gemma2")  # Gemma2: a sliding window of 20 tokens in every other layer, soft caps
STEM, OTHER = token_ids(97, 97, seed=5)
NEW = 5


def params(seed: int = 1, **others: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, "seed": seed, "temperature": 0.7, **others})


def cold(model: torch.nn.Module, prompt: list[int], wanted: SamplingParams) -> RequestOutput:
    """Compute the same without a cache, alone."""
    (output,), stats = run(model, [prompt], [wanted], enable_prefix_caching=False, max_num_seqs=1)
    assert stats["prefill_tokens_skipped"] == 0
    return output


@contextmanager
def serving(model: torch.nn.Module, **config: object) -> Iterator[RolloutWorker]:
    with RolloutWorker(model, config=RolloutConfig(**{"max_num_seqs": 8, **config})) as worker:
        yield worker


def ask(worker: RolloutWorker, prompt: list[int], wanted: SamplingParams) -> RequestOutput:
    return worker.generate([prompt], wanted)[0]


@pytest.mark.soak
@pytest.mark.parametrize(("block_size", "family", "dtype"), in_pairs([1, 4, 16, 64], FAMILIES, DTYPES))
def test_warm_and_partly_warm(block_size: int, family: str, dtype: torch.dtype) -> None:
    """Prompts that end just before, at and just behind the end of a block, after a longer one and a fork of it, have
    the bits of cold ones.
    """
    model = bound_model(family, dtype)
    lengths = sorted({1, 2, 3, block_size - 1, block_size, block_size + 1, 63, 64, 65} - {0})
    prompts = [STEM[:length] for length in lengths] + [STEM[:50] + OTHER[:13]]
    wanted = [params(seed) for seed in range(len(prompts))]
    whole, _ = run(model, prompts, wanted, enable_prefix_caching=False, max_num_seqs=16)
    with serving(model, block_size=block_size, max_num_batched_tokens=70) as worker:
        ask(worker, STEM, params())
        warm = worker.generate(prompts, wanted)
        assert_same_samples(warm, whole)
        expected = [min(length // block_size * block_size, length - 1) for length in lengths]
        assert [out.num_cached_tokens for out in warm[:-1]] == expected
        assert warm[-1].num_cached_tokens == 50 // block_size * block_size
        assert_same_samples(worker.generate(prompts[::-1], wanted[::-1]), whole[::-1])
    assert_matches_trainer(model, whole, wanted, "left padded")


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES))
def test_followers_equal_their_leader(family: str, dtype: torch.dtype) -> None:
    model = bound_model(family, dtype)
    prompts = [STEM[:65], STEM[:65], STEM[:64], STEM[:70] + OTHER[:3], OTHER[:33]]
    wanted = [params(7), params(7), params(3), params(4, temperature=1.0), params(5, temperature=0.0)]
    outputs, stats = run(model, prompts, wanted, max_num_batched_tokens=24, max_num_seqs=5)
    assert stats["leader_waits"] >= 3
    assert_same_samples(outputs[:1], outputs[1:2])
    for output, prompt, each in zip(outputs, prompts, wanted, strict=True):
        assert_same_samples([output], [cold(model, prompt, each)])
    assert_matches_trainer(model, outputs, wanted)


@pytest.mark.soak
@pytest.mark.parametrize(("group", "dtype"), paired([(1, 8), (37, 8), (37, 2), (48, 2), (65, 1)], DTYPES))
def test_a_group_equals_its_samples_one_by_one(group: tuple[int, int], dtype: torch.dtype) -> None:
    """A sample's numbers depend on its index and not on how many there are: a group equals its samples of one alone,
    and of fewer.
    """
    length, max_num_seqs = group
    model = bound_model("Gemma2", dtype)
    prompt = STEM[:length]
    (together,), stats = run(model, [prompt], [params(n=5)], max_num_seqs=max_num_seqs)
    assert stats["prefill_tokens_computed"] == length
    assert len({tuple(sample.token_ids) for sample in together.samples}) == 5
    (apart,), _ = run(model, [prompt], [params(n=5)], max_num_seqs=1, enable_prefix_caching=False)
    assert_same_samples([together], [apart])
    single = cold(model, prompt, params(n=1)).samples[0]
    assert (single.token_ids, single.logprobs) == (together.samples[0].token_ids, together.samples[0].logprobs)
    assert_matches_trainer(model, [together], [params()])


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), paired(FAMILIES, DTYPES, shift=1))
def test_turns_of_a_conversation(family: str, dtype: torch.dtype) -> None:
    """Each turn of a conversation goes on behind blocks that decode has published."""
    model = bound_model(family, dtype)
    with serving(model, block_size=4) as worker:
        prompt = STEM[:10]
        for turn in range(3):
            wanted = params(turn, max_tokens=13)
            output = ask(worker, prompt, wanted)
            assert output.num_cached_tokens == (0 if turn == 0 else (len(prompt) - 4) // 4 * 4)
            assert_same_samples([output], [cold(model, prompt, wanted)])
            assert_matches_trainer(model, [output], [wanted], "right padded")
            prompt = prompt + output.samples[0].token_ids + OTHER[turn : turn + 3]


@pytest.mark.soak
@pytest.mark.parametrize(("policy", "dtype"), paired(["lru", "ref_zero"], DTYPES))
def test_after_evictions_and_preemptions(policy: str, dtype: torch.dtype) -> None:
    model = bound_model("Gemma2", dtype)
    prompts = [(STEM if number % 3 else OTHER)[: 20 + 9 * number] for number in range(8)]
    wanted = [params(number, n=1 + number % 3, max_tokens=14) for number in range(8)]
    whole, _ = run(model, prompts, wanted, enable_prefix_caching=False)
    crowded = {"num_blocks": 28, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    with serving(model, eviction_policy=policy, **crowded) as worker:
        for _ in range(2):
            assert_same_samples(worker.generate(prompts, wanted), whole)
        stats = worker.stats()
    assert stats["preemptions"] > 0
    assert stats["prefix_evictions"] > 30
    assert stats["prefill_tokens_skipped"] > 0
    assert_matches_trainer(model, whole, wanted)


TIGHT = [
    ("Qwen3", 63, {"block_size": 16, "num_blocks": 11}, 63),
    ("Qwen3", 63, {"block_size": 16, "num_blocks": 8}, None),
    ("NemotronH", 97, {"num_blocks": 5}, 97),
    ("NemotronH", 97, {"num_blocks": 4}, None),
]
"""Lists (family, length, config, tokens of the prompt that are computed or None)."""


@pytest.mark.soak
@pytest.mark.parametrize(("case", "dtype"), paired(TIGHT, DTYPES))
def test_a_group_in_tight_memory(case: tuple[str, int, dict[str, int], int | None], dtype: torch.dtype) -> None:
    """The end of a group's prompt is copied from samples that run when memory is tight; where none runs, it is computed
    and held again.
    """
    family, length, config, computed = case
    model = bound_model(family, dtype)
    prompts, wanted = [STEM[:length]], [params(n=6, max_tokens=46 if length == 63 else 40)]
    config = {"max_num_seqs": 2, "max_model_len": 160, **config}
    outputs, stats = run(model, prompts, wanted, **config)
    whole, _ = run(model, prompts, wanted, **config, enable_prefix_caching=False)
    assert_same_samples(outputs, whole)
    assert_matches_trainer(model, outputs, wanted)
    assert (stats["preemptions"] > 0) == (computed is None)
    assert computed in (None, stats["prefill_tokens_computed"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_there_and_back(dtype: torch.dtype) -> None:
    """Weights that change and change back share nothing: what is cached under one set is not seen under the other,
    neither after the update nor after the way back.
    """
    model = make_model("Qwen3", dtype)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    second = {name: tensor * 0.9 for name, tensor in first.items()}
    prompts, wanted = [STEM[:40], STEM[:55]], [params(1), params(2, n=2)]
    with serving(model, block_size=4) as worker:
        fresh = worker.generate(prompts, wanted)
        assert_matches_trainer(model, fresh, wanted)
        for version, weights in enumerate((second, first), 1):
            worker.load_state_dict(weights)
            assert worker.stats()["blocks_cached"] == 0
            outputs = worker.generate(prompts, wanted)
            assert outputs[0].num_cached_tokens == 0
            assert outputs[1].samples[0].weight_versions == [(0, NEW, version)]
            assert_matches_trainer(model, outputs, wanted)
        assert_same_samples(outputs, fresh)


def test_what_an_update_leaves_running_is_never_hit() -> None:
    """A request keeps its old KV through an update, and that is never hit: whoever asks for the same tokens then gets
    the new weights'.
    """
    model = make_model("Qwen3")
    second = {name: tensor * 0.9 for name, tensor in model.state_dict().items()}
    with serving(model, block_size=4) as worker:
        handle = worker.submit(STEM[:20], params(1, max_tokens=120))
        next(iter(handle))
        worker.load_state_dict(second)
        (old,) = handle.result(timeout=HANG).samples
        assert [version for _, _, version in old.kv_versions] == [0, 1]
        again = ask(worker, STEM[:20] + old.token_ids, params(2))
        assert again.num_cached_tokens == 0
        assert_matches_trainer(model, [again], [params(2)])


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype", "block_size"), in_pairs(FAMILIES, DTYPES, [4, 64]))
def test_a_warm_prompt_is_scored_like_a_cold_one(family: str, dtype: torch.dtype, block_size: int) -> None:
    model = bound_model(family, dtype)
    wanted = params(prompt_logprobs=2, max_tokens=3)
    with serving(model, block_size=block_size, max_num_batched_tokens=70) as worker:
        ask(worker, STEM, params())
        for length in (1, 2, 64, 65):
            warm, alone = ask(worker, STEM[:length], wanted), cold(model, STEM[:length], wanted)
            assert_same_samples([warm], [alone])
            assert warm.prompt_logprobs[0] is None
            assert_same_bits(*([torch.tensor(out.prompt_logprobs[1:])] for out in (warm, alone)))
            assert [None if top is None else len(top) >= 2 for top in warm.prompt_top_logprobs] == [
                None,
                *[True] * (length - 1),
            ]
            assert warm.prompt_top_logprobs == alone.prompt_top_logprobs


def test_salted_requests_share_nothing_and_differ_in_nothing() -> None:
    model = bound_model("Qwen3")
    with serving(model) as worker:
        outputs = [ask(worker, STEM, params(cache_salt=salt)) for salt in (None, "a", "b", "a")]
    assert [out.num_cached_tokens for out in outputs] == [0, 0, 0, 96]
    for output in outputs[1:]:
        assert_same_samples([output], outputs[:1])
