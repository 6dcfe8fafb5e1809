"""Hybrid models in the worker: whatever the cache of states does, the bits are the trainer's."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebit.kernels import bind
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import ModelLoadError

from .compare import assert_matches_trainer, assert_same_samples, budget, run
from .families import DTYPES, HYBRIDS, bound_model, make_model, token_ids

MAX_LEN = 300
STEM, OTHER = token_ids(200, 200, seed=5)
PROMPTS = [*(STEM[:length] for length in (1, 2, 3, 4, 63, 64, 65, 128, 130, 192)), OTHER[:100]]
NEW = 40
SIX = ("NemotronH", "Bamba", "GraniteMoeHybrid", "FalconH1", "Zamba2", "Mamba2")
CAMPAIGN = "SAMEBIT_SOAK_CASES" in os.environ
EVERY = [(family, dtype) for family in SIX for dtype in DTYPES]
"""What `make soak` runs; `make test` takes fewer."""

CAUSES = ("evicted", "diverged", "no_checkpoint")


def params(count: int, n: int = 1) -> list[SamplingParams]:
    return [SamplingParams(n=n, seed=seed, max_tokens=NEW, ignore_eos=True, temperature=0.7) for seed in range(count)]


def uncached(model: torch.nn.Module, prompts: list[list[int]], wanted: list[SamplingParams]) -> list[RequestOutput]:
    outputs, stats = run(model, prompts, wanted, enable_prefix_caching=False, max_model_len=MAX_LEN)
    assert stats["prefill_tokens_skipped"] == 0
    return outputs


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, torch.float32) for name in HYBRIDS), *((name, torch.bfloat16) for name in SIX)]
)
def test_cold_warm_and_next_turn(family: str, dtype: torch.dtype) -> None:
    model = bound_model(family, dtype)
    wanted = params(len(PROMPTS))
    whole = uncached(model, PROMPTS, wanted)
    assert_matches_trainer(model, whole, wanted)
    with RolloutWorker(model, config=RolloutConfig(max_model_len=MAX_LEN, max_num_batched_tokens=70)) as worker:
        assert_same_samples(worker.generate(PROMPTS, wanted), whole)
        warm = worker.generate(PROMPTS, wanted)
        assert_same_samples(warm, whole)
        assert [out.num_cached_tokens for out in warm] == [0, 0, 0, 0, 0, 0, 64, 64, 128, 128, 64]
        turns = [[*out.prompt_token_ids, *out.samples[0].token_ids, 7, 8] for out in whole]
        outputs = worker.generate(turns, wanted)
        assert_same_samples(outputs, uncached(model, turns, wanted))
        assert [out.num_cached_tokens for out in outputs[-3:]] == [128, 192, 128], "decode reached the end of a block"
        stats = worker.stats()
    assert stats["state_restores"] >= 6
    assert 0 < stats["states_used"] <= stats["states_total"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seats", [12, 2])
def test_a_group_forks_the_state_of_its_prompt(dtype: torch.dtype, seats: int) -> None:
    """Also when not all samples run at once; prompts on and off the grid."""
    model = bound_model("NemotronH", dtype)
    prompts, wanted = [STEM[:100], STEM[:64], OTHER[:3]], params(3, n=4)
    outputs, stats = run(model, prompts, wanted, max_model_len=MAX_LEN, max_num_seqs=seats)
    assert_same_samples(outputs, uncached(model, prompts, wanted))
    assert_matches_trainer(model, outputs, wanted)
    assert stats["state_forks"] >= (9 if seats == 12 else 1)
    if seats == 12:
        assert stats["prefill_tokens_computed"] == 100 + 64 + 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [100, 64, 3])
def test_samples_without_a_seat_fork_the_prompt_s_state_when_they_get_one(length: int, dtype: torch.dtype) -> None:
    """One prefill, whatever the number of seats: nothing of the prompt is computed again."""
    model = bound_model("NemotronH", dtype)
    prompts, wanted = [STEM[:length]], params(1, n=8)
    outputs, stats = run(model, prompts, wanted, max_model_len=MAX_LEN, max_num_seqs=2)
    assert_same_samples(outputs, uncached(model, prompts, wanted))
    assert_matches_trainer(model, outputs, wanted)
    assert (stats["prefill_tokens_computed"], stats["state_tokens_replayed"]) == (length, 0)
    assert (stats["state_holds"], stats["state_forks"], stats["state_restores"]) == (1, 7, 0)


@pytest.mark.parametrize("length", [100, 127, 128])
def test_requests_that_arrive_together_share_down_to_the_grid(length: int) -> None:
    """The first computes what they share and takes a checkpoint where the others leave it."""
    model = bound_model("Bamba")
    prompts = [[*STEM[:length], *OTHER[10 * index : 10 * index + 9]] for index in range(6)]
    wanted = params(6)
    outputs, _ = run(model, prompts, wanted, max_model_len=MAX_LEN)
    grid = length // 64 * 64
    assert [out.num_cached_tokens for out in outputs] == [0, *[grid] * 5]
    assert_same_samples(outputs, uncached(model, prompts, wanted))


def test_a_request_that_waits_behind_others_finds_a_state_where_it_leaves_a_chain() -> None:
    """One runs at a time, so the third is not at the head of the queue while the first is computed."""
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


@pytest.mark.soak
@pytest.mark.parametrize("checkpoints", [0, 1, 3])
@pytest.mark.parametrize(("family", "dtype"), EVERY if CAMPAIGN else [("FalconH1", torch.float32)])
def test_states_or_blocks_are_evicted(family: str, dtype: torch.dtype, checkpoints: int) -> None:
    """Few states with all blocks, and few blocks; a hit without a state is counted by its cause."""
    model = bound_model(family, dtype)
    prompts, wanted = [STEM[:130], OTHER[:130], STEM[50:180], OTHER[50:180]], params(4)
    whole = uncached(model, prompts, wanted)
    for num_blocks in (100, 4):
        config = RolloutConfig(
            max_model_len=250, num_blocks=num_blocks, state_cache_gb=budget(model, checkpoints), max_num_seqs=3
        )
        with RolloutWorker(model, config=config) as worker:
            for _ in range(3):
                assert_same_samples(worker.generate(prompts, wanted), whole)
            stats = worker.stats()
        assert stats["states_used"] <= checkpoints
        if num_blocks == 100:
            missed = stats["state_misses_evicted"], stats["state_misses_no_checkpoint"]
            assert missed[0] > 0 if checkpoints else missed[1] > 0
            assert stats["state_tokens_replayed"] > 0
        else:
            assert stats["preemptions"] + stats["prefix_evictions"] > 0


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
        assert_same_samples(worker.generate(PROMPTS, wanted), whole)
    assert_matches_trainer(model, whole, wanted)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "dtype", "block_size"),
    [(*each, size) for each in EVERY for size in (64, 128)]
    if CAMPAIGN
    else [("NemotronH", torch.float32, 64), ("NemotronH", torch.bfloat16, 128)],
)
def test_hits_at_every_offset(family: str, dtype: torch.dtype, block_size: int) -> None:
    """The prompts leave a cached one on the block grid, on the state grid alone, off both, in the window behind it."""
    model = bound_model(family, dtype)
    shared = (64, 128, 192, 100, 129, 130, 131)
    prompts = [[*STEM[:length], *OTHER[length : length + own]] for length in shared for own in (1, 2, 30)]
    wanted = params(len(prompts))
    whole = uncached(model, prompts, wanted)
    config = RolloutConfig(max_model_len=MAX_LEN, block_size=block_size, state_cache_gb=budget(model, 100))
    with RolloutWorker(model, config=config) as worker:
        worker.generate([STEM], params(1))
        first = [worker.generate([prompt], own)[0] for prompt, own in zip(prompts, wanted, strict=True)]
        again = worker.generate(prompts, wanted)
    assert_same_samples(first, whole)
    assert_same_samples(again, whole)
    assert [out.num_cached_tokens for out in again] == [
        (len(prompt) - 1) // block_size * block_size for prompt in prompts
    ]


@pytest.mark.parametrize("block_size", [64, 128])
def test_a_finished_sequence_leaves_a_state_at_its_last_block(block_size: int) -> None:
    """Also when it has gone on for more than a chunk behind the block: the next turn resumes there."""
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
    with pytest.raises(ValueError, match="no Mamba layers"):
        RolloutWorker(bound_model("Qwen3"), config=RolloutConfig(state_cache_gb=1.0))
