"""Hybrid models in the worker have the trainer's bits, whatever the cache of states does."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebit.kernels import bind
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import ModelLoadError

from .compare import assert_matches_trainer, assert_same_samples, budget, run
from .families import (
    CAMPAIGN,
    DIFFERENT_HYBRIDS,
    DTYPES,
    HYBRIDS,
    bound_model,
    make_model,
    of_families,
    paired,
    token_ids,
)

MAX_LEN = 300
STEM, OTHER = token_ids(200, 200, seed=5)
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 128, 130, 192) if CAMPAIGN else (1, 3, 4, 64, 65, 130, 192)
PROMPTS = [*(STEM[:length] for length in LENGTHS), OTHER[:100]]
FOUR = [STEM[:130], OTHER[:130], STEM[50:180], OTHER[50:180]]
NEW = 32
SIX = ("NemotronH", "Bamba", "GraniteMoeHybrid", "FalconH1", "Zamba2", "Mamba2")
EVERY = [(family, dtype) for family in SIX for dtype in DTYPES]
"""Lists what `make soak` runs; `make test` takes fewer."""
GRIDS = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256))
"""Lists (SSM chunk, block size)."""
LONG_LEN = 900
"""Is the length of models whose prompts hold several blocks of 256 tokens."""

OWN = (1, 2, 30) if CAMPAIGN else (1, 30)
"""Counts the tokens of prompts behind those that they share with another."""

CAUSES = ("evicted", "diverged", "no_checkpoint")


def params(count: int, n: int = 1, new: int = NEW) -> list[SamplingParams]:
    return [SamplingParams(n=n, seed=seed, max_tokens=new, ignore_eos=True, temperature=0.7) for seed in range(count)]


def uncached(
    model: torch.nn.Module, prompts: list[list[int]], wanted: list[SamplingParams], max_len: int = MAX_LEN
) -> list[RequestOutput]:
    outputs, stats = run(model, prompts, wanted, enable_prefix_caching=False, max_model_len=max_len)
    assert stats["prefill_tokens_skipped"] == 0
    return outputs


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), of_families(paired(HYBRIDS, DTYPES), DIFFERENT_HYBRIDS))
def test_cold_warm_and_next_turn(family: str, dtype: torch.dtype) -> None:
    model = bound_model(family, dtype)
    wanted = params(len(PROMPTS))
    whole = uncached(model, PROMPTS, wanted)
    assert_matches_trainer(model, whole, wanted)
    with RolloutWorker(model, config=RolloutConfig(max_model_len=MAX_LEN, max_num_batched_tokens=70)) as worker:
        assert_same_samples(worker.generate(PROMPTS, wanted), whole)
        warm = worker.generate(PROMPTS, wanted)
        assert_same_samples(warm, whole)
        assert [out.num_cached_tokens for out in warm] == [(len(prompt) - 1) // 64 * 64 for prompt in PROMPTS]
        assert [out.num_cached_tokens for out in warm[-3:]] == [128, 128, 64]
        turns = [[*out.prompt_token_ids, *out.samples[0].token_ids, 7, 8] for out in whole]
        following = params(len(PROMPTS), new=8)
        outputs = worker.generate(turns, following)
        assert_same_samples(outputs, uncached(model, turns, following))
        assert [out.num_cached_tokens for out in outputs[-3:]] == [128, 192, 128], "decode reached the end of a block"
        stats = worker.stats()
    assert stats["state_restores"] >= 6
    assert 0 < stats["states_used"] <= stats["states_total"]


@pytest.mark.soak
@pytest.mark.parametrize(("seats", "dtype"), paired([12, 2], DTYPES))
def test_a_group_forks_the_state_of_its_prompt(seats: int, dtype: torch.dtype) -> None:
    """A group forks the state of its prompt, also when not all samples run at once; prompts end on and off the grid."""
    model = bound_model("NemotronH", dtype)
    prompts, wanted = [STEM[:100], STEM[:64], OTHER[:3]], params(3, n=4)
    outputs, stats = run(model, prompts, wanted, max_model_len=MAX_LEN, max_num_seqs=seats)
    assert_same_samples(outputs, uncached(model, prompts, wanted))
    assert_matches_trainer(model, outputs, wanted)
    assert stats["state_forks"] >= (9 if seats == 12 else 1)
    if seats == 12:
        assert stats["prefill_tokens_computed"] == 100 + 64 + 3


@pytest.mark.soak
@pytest.mark.parametrize(("length", "dtype"), paired([100, 64, 3], DTYPES))
def test_samples_without_a_seat_fork_the_prompt_s_state_when_they_get_one(length: int, dtype: torch.dtype) -> None:
    """A prompt is prefilled once, whatever the number of seats: samples that get a seat later fork its state, and
    nothing of the prompt is computed again.
    """
    model = bound_model("NemotronH", dtype)
    prompts, wanted = [STEM[:length]], params(1, n=8)
    outputs, stats = run(model, prompts, wanted, max_model_len=MAX_LEN, max_num_seqs=2)
    assert_same_samples(outputs, uncached(model, prompts, wanted))
    assert_matches_trainer(model, outputs, wanted)
    assert (stats["prefill_tokens_computed"], stats["state_tokens_replayed"]) == (length, 0)
    assert (stats["state_holds"], stats["state_forks"], stats["state_restores"]) == (1, 7, 0)


@pytest.mark.parametrize("length", [100, 127, 128])
def test_requests_that_arrive_together_share_down_to_the_grid(length: int) -> None:
    """Requests that arrive together share down to the grid: the first computes what they share, and takes a checkpoint
    where the others leave it.
    """
    model = bound_model("Bamba")
    prompts = [[*STEM[:length], *OTHER[10 * index : 10 * index + 9]] for index in range(6)]
    wanted = params(6)
    outputs, _ = run(model, prompts, wanted, max_model_len=MAX_LEN)
    grid = length // 64 * 64
    assert [out.num_cached_tokens for out in outputs] == [0, *[grid] * 5]
    assert_same_samples(outputs, uncached(model, prompts, wanted))


def test_a_request_that_waits_behind_others_finds_a_state_where_it_leaves_a_chain() -> None:
    """A request that waits behind others finds a state where it leaves a chain. One runs at a time, so the third is not
    at the head of the queue while the first is computed.
    """
    model = bound_model("Bamba")
    prompts, wanted = [STEM[:200], OTHER[:70], [*STEM[:140], *OTHER[:9]], STEM[:64]], params(4)
    outputs, stats = run(model, prompts, wanted, max_model_len=MAX_LEN, max_num_seqs=1)
    assert [out.num_cached_tokens for out in outputs] == [0, 0, 128, 0], "a state before its last token: none"
    assert_same_samples(outputs, uncached(model, prompts, wanted))
    assert stats["state_tokens_replayed"] == 64  # the last, whose KV is all there
    assert [stats[f"state_misses_{cause}"] for cause in CAUSES] == [0, 0, 1], "and that is counted"


def test_misses_are_counted_by_cause() -> None:
    model = bound_model("Bamba")
    first, second, third = STEM[:200], [*STEM[:140], *OTHER[:9]], [*STEM[:140], *OTHER[20:29]]
    expected = uncached(model, [second, third], params(2))
    config = RolloutConfig(max_model_len=MAX_LEN, state_cache_gb=budget(model, 3))
    with RolloutWorker(model, config=config) as worker:

        def ask(prompt: list[int], seed: int = 0) -> tuple[RequestOutput, dict[str, float]]:
            before = worker.stats()
            (out,) = worker.generate([prompt], params(seed + 1)[seed])
            causes = {name: worker.stats()[f"state_misses_{name}"] - before[f"state_misses_{name}"] for name in CAUSES}
            return out, {name: count for name, count in causes.items() if count}

        assert ask(first)[1] == {}
        out, causes = ask(second)
        assert (out.num_cached_tokens, causes) == (0, {"diverged": 1}), "the first's states lie behind the fork"
        assert_same_samples([out], expected[:1])
        out, causes = ask(third, 1)
        assert (out.num_cached_tokens, causes) == (128, {}), "the second took a state where it left the first"
        assert_same_samples([out], expected[1:])
        for number in range(3):
            ask(OTHER[number : number + 100])
        out, causes = ask(second)
        assert (out.num_cached_tokens, causes) == (0, {"evicted": 1})
        assert_same_samples([out], expected[:1])


def rounds(
    model: torch.nn.Module, prompts: list[list[int]], count: int, **config: object
) -> tuple[list[list[RequestOutput]], dict[str, float]]:
    """Ask a worker of this configuration the same `count` times; check the bits of one without a cache."""
    wanted = params(len(prompts))
    whole = uncached(model, prompts, wanted)
    with RolloutWorker(model, config=RolloutConfig(max_model_len=190, **config)) as worker:
        outputs = [worker.generate(prompts, wanted) for _ in range(count)]
        stats = worker.stats()
    for found in outputs:
        assert_same_samples(found, whole)
    return outputs, stats


@pytest.mark.soak
@pytest.mark.parametrize("checkpoints", [0, 1, 3])
@pytest.mark.parametrize(("family", "dtype"), EVERY if CAMPAIGN else [("FalconH1", torch.float32)])
def test_states_are_evicted_and_blocks_are_not(family: str, dtype: torch.dtype, checkpoints: int) -> None:
    """States are evicted and blocks are not: a hit without a state is counted by its cause."""
    model = bound_model(family, dtype)
    memory = {"num_blocks": 100, "state_cache_gb": budget(model, checkpoints)}
    _, stats = rounds(model, FOUR, 3 if CAMPAIGN else 2, max_num_seqs=3, **memory)
    missed = {cause: stats[f"state_misses_{cause}"] for cause in CAUSES}
    assert missed["evicted" if checkpoints else "no_checkpoint"] > 0
    assert missed["evicted"] == 0 or checkpoints
    assert stats["state_tokens_replayed"] > 0
    assert stats["states_used"] <= checkpoints
    assert stats["prefix_evictions"] == stats["preemptions"] == 0


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), EVERY if CAMPAIGN else [("FalconH1", torch.float32)])
def test_blocks_are_evicted_and_take_their_states_along(family: str, dtype: torch.dtype) -> None:
    """Blocks are evicted and take their states along, with room for every state; each prompt comes twice, so that the
    second is a hit.
    """
    model = bound_model(family, dtype)
    twice = [FOUR[0], FOUR[0], FOUR[1], FOUR[1]]
    outputs, stats = rounds(model, twice, 2, num_blocks=3, state_cache_gb=budget(model, 100), max_num_seqs=1)
    assert [[out.num_cached_tokens for out in found] for found in outputs] == 2 * [[0, 128, 0, 128]]
    assert stats["prefix_evictions"] > 0
    assert [stats[f"state_misses_{cause}"] for cause in CAUSES] == [0, 0, 0]
    assert 0 < stats["states_used"] <= stats["blocks_cached"] <= 3 < stats["states_total"]
    assert stats["preemptions"] == stats["state_tokens_replayed"] == 0


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), EVERY if CAMPAIGN else [("FalconH1", torch.float32)])
def test_a_preempted_sequence_resumes_at_its_state(family: str, dtype: torch.dtype) -> None:
    """A preempted sequence resumes at its state: three prompts fit, three answers do not; no block is evicted, so the
    one that gives way finds what it had.
    """
    model = bound_model(family, dtype)
    prompts = [prompt[:60] for prompt in FOUR[:3]]
    _, stats = rounds(model, prompts, 1, num_blocks=5, state_cache_gb=budget(model, 100), max_num_seqs=3)
    assert stats["preemptions"] > 0
    assert stats["state_restores"] == stats["preemptions"]
    assert stats["prefix_evictions"] == 0
    assert [stats[f"state_misses_{cause}"] for cause in CAUSES] == [0, 0, 0]


@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), EVERY if CAMPAIGN else [("NemotronH", torch.float32)])
def test_weights_there_and_back(family: str, dtype: torch.dtype) -> None:
    model = bind(make_model(family, dtype))
    wanted = params(len(PROMPTS))
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with RolloutWorker(model, config=RolloutConfig(max_model_len=MAX_LEN)) as worker:
        whole = worker.generate(PROMPTS, wanted)
        worker.load_state_dict({name: tensor * 0.5 for name, tensor in first.items()})
        assert worker.stats()["states_used"] == 0
        between = worker.generate(PROMPTS, wanted)
        assert_matches_trainer(model, between, wanted)
        worker.sleep("kv_cache")
        worker.wake_up()
        worker.load_state_dict(first)
        assert_same_samples(worker.generate(PROMPTS, wanted), whole)
    assert_matches_trainer(model, whole, wanted)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "dtype", "chunk"),
    [(*each, chunk) for each in EVERY for chunk in (16, 128, 256)]
    if CAMPAIGN
    else [("NemotronH", torch.bfloat16, 16), ("Bamba", torch.float32, 128), ("FalconH1", torch.bfloat16, 256)],
)
def test_other_chunks(family: str, dtype: torch.dtype, chunk: int) -> None:
    model = bound_model(family, dtype, ssm_chunk=chunk)
    wanted = params(len(PROMPTS))
    with RolloutWorker(model, config=RolloutConfig(max_model_len=MAX_LEN)) as worker:
        assert worker.config.block_size == chunk
        whole = worker.generate(PROMPTS, wanted)
        warm = worker.generate(PROMPTS, wanted)
    assert_same_samples(warm, whole)
    assert [out.num_cached_tokens for out in warm] == [(len(prompt) - 1) // chunk * chunk for prompt in PROMPTS]
    assert_matches_trainer(model, whole, wanted)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "dtype", "chunk", "block_size"),
    [(*each, *grid) for each in EVERY for grid in GRIDS]
    if CAMPAIGN
    else [
        ("NemotronH", torch.float32, 64, 64),
        ("FalconH1", torch.bfloat16, 64, 128),
        ("Bamba", torch.float32, 128, 256),
    ],
)
def test_hits_at_every_offset(family: str, dtype: torch.dtype, chunk: int, block_size: int) -> None:
    """Hits are exact at every offset: the prompts leave a cached one on the block grid, on the state grid alone, off
    both, in the window behind it.
    """
    model = bound_model(family, dtype, chunk, max_position_embeddings=LONG_LEN)
    stem, other = token_ids(2 * block_size + chunk + 8, LONG_LEN, seed=6)
    behind = (*(block_size + tokens for tokens in (1, 2, 3)), block_size + chunk // 2 + 5)
    shared = sorted({chunk, block_size, block_size + chunk, 2 * block_size, *behind})
    pairs = [(length, own) for length in shared for own in OWN] + [(2 * block_size, 0)]
    prompts = [[*stem[:length], *other[length : length + own]] for length, own in pairs]
    wanted = params(len(prompts), new=6)
    whole = uncached(model, prompts, wanted, LONG_LEN)
    assert_matches_trainer(model, whole, wanted)
    config = RolloutConfig(max_model_len=LONG_LEN, block_size=block_size, state_cache_gb=budget(model, 100))
    with RolloutWorker(model, config=config) as worker:
        worker.generate([stem], params(1))
        first = [worker.generate([prompt], own)[0] for prompt, own in zip(prompts, wanted, strict=True)]
        again = worker.generate(prompts, wanted)
    assert_same_samples(first, whole)
    assert_same_samples(again, whole)
    assert [out.num_cached_tokens for out in first] == first_hits(len(stem), pairs, block_size)
    ends = [(len(prompt) - 1) // block_size * block_size for prompt in prompts]
    assert [out.num_cached_tokens for out in again] == ends
    assert {0, block_size, 2 * block_size} >= {*ends} >= {block_size, 2 * block_size}


def first_hits(stem: int, pairs: list[tuple[int, int]], block_size: int) -> list[int]:
    """Return where prompts resume that share so many tokens with a cached one and have so many of their own, one by
    one.

    The cached one has a state at its last full block, and each that leaves it takes one where it does.
    """
    states, hits = {0, stem // block_size}, []
    for length, own in pairs:
        reach = min(length, length + own - 1) // block_size
        hits.append(max(end for end in states if end <= reach) * block_size)
        states.add(length // block_size)
    return hits


@pytest.mark.parametrize("block_size", [64, 128])
def test_a_finished_sequence_leaves_a_state_at_its_last_block(block_size: int) -> None:
    """A finished sequence leaves a state at its last block, also when it has gone on for more than a chunk behind it:
    the next turn resumes there.
    """
    model = bound_model("Bamba")
    config = RolloutConfig(max_model_len=MAX_LEN, block_size=block_size)
    with RolloutWorker(model, config=config) as worker:
        (out,) = worker.generate([STEM[:100]], SamplingParams(max_tokens=111, ignore_eos=True))  # 210 computed
        turn = [*STEM[:100], *out.samples[0].token_ids, 5]
        (following,) = worker.generate([turn], params(1))
    assert following.num_cached_tokens == 210 // block_size * block_size
    assert_same_samples([following], uncached(model, [turn], params(1)))


def test_no_budget_for_states_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = bound_model("Mamba2")
    with RolloutWorker(model, config=RolloutConfig(max_model_len=MAX_LEN, state_cache_gb=0)) as worker:
        for _ in range(2):
            worker.generate(PROMPTS, params(len(PROMPTS)))
        stats = worker.stats()
    assert [record.levelname for record in caplog.records if "state_cache_gb=0" in record.message] == ["WARNING"]
    assert stats["states_total"] == stats["states_used"] == stats["prefill_tokens_skipped"] == 0
    assert stats["state_misses_no_checkpoint"] > 0


def test_a_hybrid_family_without_mamba_layers_has_no_states() -> None:
    with RolloutWorker(bound_model("GraniteMoeHybrid, dense")) as worker:
        assert worker.config.block_size == 16
        assert worker.stats().get("states_total", 0) == 0


def test_a_checkpoint_without_its_convolution_bias_is_refused(tmp_path: Path) -> None:
    make_model("NemotronH").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = next(name for name in weights if name.endswith("conv1d.bias"))
    save_file({name: tensor for name, tensor in weights.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"conv1d\.bias"):
        RolloutWorker(str(tmp_path))


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"multiple of the model's SSM chunk \(64\), got 16"):
        RolloutWorker(bound_model("Bamba"), config=RolloutConfig(block_size=16))
    with pytest.raises(ValueError, match=r"does not hold one state of \d+ bytes"):
        RolloutWorker(bound_model("Bamba"), config=RolloutConfig(state_cache_gb=1e-9))
    with pytest.raises(ValueError, match="no recurrent layers"):
        RolloutWorker(bound_model("Qwen3"), config=RolloutConfig(state_cache_gb=1.0))
