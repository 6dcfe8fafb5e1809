"""Parameters, configurations and requests that are wrong are refused when they are made."""

from __future__ import annotations

import re
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from samebit.kernels import bind
from samebit.rollout.config import RolloutConfig
from samebit.rollout.engine import step_plan
from samebit.rollout.errors import RequestError
from samebit.rollout.memory.pool_sizes import count_blocks, count_checkpoints
from samebit.rollout.requests.limits import RequestLimits
from samebit.rollout.runner import cuda_pool_size
from samebit.rollout.runner.cuda_pool_size import kv_cache_bytes, left_for_pages
from samebit.rollout.sampling_params import SamplingParams

from ..tiny_llama import smallest

NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", NAN),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["a", 3]),
        ("stop", 3),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", "all"),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", NAN),
        ("repetition_penalty", NAN),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {5: 1e39}),
        ("logit_bias", {5: -(10**400)}),
        ("logit_bias", {5: np.float64("-inf")}),
        ("logit_bias", {5: np.True_}),
        ("logit_bias", {5: torch.tensor(1.0)}),
        ("logit_bias", {np.True_: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {np.float32(5): 1.0}),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 1e-50),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", 10**400),
        ("repetition_penalty", np.bool_(True)),
        ("temperature", 3.5e38),
        ("temperature", 10**400),
        ("temperature", np.array(1.0)),
        ("temperature", torch.tensor(1.0)),
        ("temperature", 1 + 0j),
        ("top_p", np.float32("nan")),
        ("top_k", np.float64(3)),
        ("n", 16385),
        ("n", np.True_),
        ("n", np.array(2)),
        ("max_tokens", np.bool_(True)),
        ("seed", np.uint64(2**63)),
        ("stop_token_ids", [np.True_]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", np.array([1.0])),
        ("stop_token_ids", np.array(3)),
        ("stop_token_ids", np.array([[1], [2]])),
        ("stop_token_ids", np.array([True])),
        ("ignore_eos", np.int64(1)),
        ("logprobs", np.False_),
    ],
)
def test_a_wrong_sampling_parameter_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_numpy_s_scalars_are_the_numbers_that_they_hold() -> None:
    given = SamplingParams(
        n=np.int8(2), temperature=np.float32(0.7), top_p=np.float16(0.5), top_k=np.uint32(3), min_p=np.float64(0.1),
        max_tokens=np.int64(9), min_tokens=np.int16(1), stop_token_ids=np.array([3, 4], np.int32),
        ignore_eos=np.True_, seed=np.uint64(2**63 - 1), logprobs=np.int32(0), prompt_logprobs=np.int64(1),
        repetition_penalty=np.float32(1.5), logit_bias={np.int64(5): np.float32(0.5), 6: np.int64(-2)},
    )  # fmt: skip
    plain = SamplingParams(
        n=2, temperature=float(np.float32(0.7)), top_p=0.5, top_k=3, min_p=0.1, max_tokens=9, min_tokens=1,
        stop_token_ids=[3, 4], ignore_eos=True, seed=2**63 - 1, logprobs=0, prompt_logprobs=1, repetition_penalty=1.5,
        logit_bias={5: 0.5, 6: -2},
    )  # fmt: skip
    assert given == plain
    values = [value for value in vars(given).values() if value is not None]
    values += [*given.stop_ids, *(given.logit_bias or {}), *(given.logit_bias or {}).values()]
    assert not [value for value in values if isinstance(value, np.generic | np.ndarray)]
    assert SamplingParams(stop_token_ids=(np.int64(3), 4)).stop_ids == (3, 4)


def take(field: str, value: object) -> tuple[object, str]:
    """Return the value that is kept, and why it was refused."""
    try:
        return vars(SamplingParams(**{field: value, "max_tokens": None}))[field], ""
    except ValueError as error:
        return None, str(error)


@settings(deadline=None)
@given(
    value=st.one_of(
        st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=2), st.complex_numbers(),
        st.sampled_from([np.float64("inf"), np.float32(0), np.uint8(3), np.True_, np.array([1]), 10**5000, 1e-45]),
    )
)  # fmt: skip
def test_whatever_is_given_is_taken_or_named(value: object) -> None:
    kinds = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float)
    kinds |= {"n": int, "top_k": int, "min_tokens": int, "ignore_eos": bool}
    for field, kind in kinds.items():
        taken, refusal = take(field, value)
        assert field in refusal or type(taken) is kind
        assert refusal or kind is not float or np.isfinite(np.float32(taken))


@pytest.mark.parametrize("value", [3, "", b"a", False, ["a"]])
def test_a_wrong_cache_salt_is_named_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string or None, got ") as caught:
        SamplingParams(cache_salt=value)
    assert str(caught.value).endswith(f"got {value!r}")


def test_an_unknown_sampling_parameter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_the_callers_later_changes_do_not_reach_in() -> None:
    stop, bias = ["x"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("y")
    bias[2] = 3.0
    assert params.stop_strings == ("x",)
    assert params.logit_bias == {1: 2.0}
    assert SamplingParams(stop="one").stop_strings == ("one",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", 12),
        ("block_size", True),
        ("num_blocks", 0),
        ("kv_cache_gb", 0.0),
        ("kv_cache_gb", NAN),
        ("kv_cache_gb", "1"),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 63),
        ("max_model_len", 1),
        ("num_threads", 0),
        ("seed", -1),
        ("enable_prefix_caching", 1),
        ("eviction_policy", "fifo"),
        ("while_asleep", "queue"),
        ("exact", 1),
        ("enforce_eager", 1),
        ("async_scheduling", 1),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", NAN),
        ("dtype", "int8"),
        ("dtype", torch.float64),
        ("dtype", "float16"),
        ("dtype", 32),
        ("device", "tpu"),
        ("num_blocks", np.True_),
        ("num_blocks", np.float64(4)),
        ("max_num_seqs", np.array(4)),
        ("block_size", np.int64(12)),
        ("kv_cache_gb", 10**100),
        ("kv_cache_gb", np.float32("inf")),
        ("kv_cache_gb", np.True_),
        ("state_cache_gb", False),
        ("state_cache_gb", np.float64("nan")),
        ("seed", np.uint64(2**63)),
        ("seed", True),
        ("exact", np.int64(1)),
        ("num_threads", torch.tensor(1)),
    ],
)
def test_a_wrong_configuration_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        RolloutConfig(**{field: value})
    assert str(value) in str(caught.value)


def test_a_configuration_of_numpy_s_scalars_is_that_of_the_numbers() -> None:
    given = RolloutConfig(
        block_size=np.int64(32), num_blocks=np.uint16(9), max_num_seqs=np.int32(4), max_model_len=np.int64(64),
        max_num_batched_tokens=np.int64(128), num_threads=np.int8(1), seed=np.uint64(7), state_cache_gb=np.float32(0.5),
        enable_prefix_caching=np.True_, exact=np.False_, async_scheduling=np.False_,
    )  # fmt: skip
    assert given == RolloutConfig(
        block_size=32, num_blocks=9, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=128, num_threads=1,
        seed=7, state_cache_gb=0.5, exact=False, async_scheduling=False,
    )  # fmt: skip
    assert not [value for value in vars(given).values() if isinstance(value, np.generic)]
    assert type(RolloutConfig(kv_cache_gb=np.float16(0.5)).kv_cache_gb) is float


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"device='cuda', but torch .* sees no CUDA device here; allowed: 'cpu'"):
        RolloutConfig(device="cuda")


def test_the_pool_is_given_in_one_way_only() -> None:
    with pytest.raises(ValueError, match=r"give one of num_blocks, .*; got num_blocks=4 and kv_cache_gb=1\.0"):
        RolloutConfig(num_blocks=4, kv_cache_gb=1.0)
    with pytest.raises(ValueError, match=r"got kv_cache_gb=1\.0 and gpu_memory_utilization=0\.9"):
        RolloutConfig(kv_cache_gb=1.0, gpu_memory_utilization=0.9)


def test_a_share_of_a_gpu_s_memory_is_refused_on_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0\.9 needs device='cuda', got 'cpu'"):
        RolloutConfig(gpu_memory_utilization=0.9)


def test_a_share_of_a_gpu_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = RolloutConfig(device="cuda", gpu_memory_utilization=0.5).with_block_size(None)
    left = left_for_pages(total=80 * 2**30, free=60 * 2**30, share=0.5, reserved=4 * 2**30)
    assert left == 16 * 2**30, "half of all, less what is in use and what is reserved"
    assert count_blocks(config, 2**20, 100, left) == 16 * 2**10
    assert config.block_size == RolloutConfig(device="cuda").with_block_size(16).block_size == 64
    assert RolloutConfig(device="cuda", block_size=128).with_block_size(64).block_size == 128
    with pytest.raises(ValueError, match="block_size on 'cuda' must be a power of two from 64 on or None, got 32"):
        RolloutConfig(device="cuda", block_size=32)
    assert RolloutConfig(device="cuda").gpu_share == 0.85, "where nothing else is asked for"
    assert RolloutConfig(device="cuda", num_blocks=7).gpu_share is None
    assert left_for_pages(total=80, free=10, share=0.5, reserved=0) == 0
    with pytest.raises(
        ValueError, match=r"leaves 0\.000000 GiB for pages; one sequence of max_model_len=100 needs 0\.001"
    ):
        count_blocks(config, 2**20, 100, 0)


def test_a_share_is_measured_without_what_nobody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of memory is measured without what nobody holds: a bound model is a circle, and in memory until the
    collector comes by.
    """
    dropped = nn.Linear(1, 1)
    vars(dropped)["forward"] = dropped.forward
    found = weakref.ref(dropped)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 if found() else 60, 80))
    monkeypatch.setattr(cuda_pool_size, "_step_bytes", lambda *_: 0)
    del dropped
    assert kv_cache_bytes(nn.Linear(1, 1), 0.5, 1, 1, 0) == 20


def test_the_largest_step_scores_as_many_prompt_tokens_as_a_step_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step scores as many prompt tokens as a step may, beside the rows of the sequences; it is computed on
    the CPU here, where no memory is counted.
    """
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(step_plan, "SCORED_BYTES", 5 * 4 * 50)
    model = bind(smallest())
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda head, given, out: rows.append(out.shape[-2]))
    for num_tokens in (20, 6):
        assert cuda_pool_size._step_bytes(model, num_tokens, 3, torch.device("cpu")) == 7
    assert rows == [3 + 3 + 5, 6]


def test_the_size_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gib = 2**30
    assert count_blocks(RolloutConfig(num_blocks=7).with_block_size(None), gib, 100) == 7
    assert count_blocks(RolloutConfig(kv_cache_gb=0.5).with_block_size(None), gib // 8, 100) == 4
    assert count_blocks(RolloutConfig(max_num_seqs=3).with_block_size(None), 1024, 100) == 3 * 7
    assert count_blocks(RolloutConfig().with_block_size(None), gib // 16, 160) == 16, "capped at 1 GiB"
    assert count_blocks(RolloutConfig().with_block_size(None), gib, 160) == 10, "but one whole sequence always fits"
    with pytest.raises(
        ValueError, match=r"kv_cache_gb=0\.5 does not hold one block of .* at least 1\.000000 are needed"
    ):
        count_blocks(RolloutConfig(kv_cache_gb=0.5).with_block_size(None), gib, 100)
    for config, blocks in (
        (RolloutConfig(max_num_seqs=3, kv_cache_gb=0.5), 3 * 8),
        (RolloutConfig(max_num_seqs=3), 3 * 8),
        (RolloutConfig(max_num_seqs=3, device="cuda"), 3 * 2),
    ):
        assert count_blocks(config.with_block_size(16), 0, 128, 60 * gib) == blocks, "no attention: those of use"


@pytest.mark.parametrize(
    "size", [1, 1000, 1074, 2**20 - 1, 2**20, 2**20 + 1, 3 * 10**8 + 7, 2**30, 2**30 + 1, 10**12 + 9]
)
def test_the_number_that_an_error_asks_for_is_accepted(size: int) -> None:
    """The number that an error asks for is accepted, and no number with as many digits below it."""
    with pytest.raises(ValueError, match="at least") as caught:
        count_blocks(RolloutConfig(kv_cache_gb=1e-12).with_block_size(None), size, 100)
    with pytest.raises(ValueError, match="at least") as states:
        count_checkpoints(RolloutConfig(state_cache_gb=1e-12), size)
    asked = [str(error.value).split("at least ")[1].split()[0] for error in (caught, states)]
    assert asked[0] == asked[1]
    enough = float(asked[0])
    assert count_blocks(RolloutConfig(kv_cache_gb=enough).with_block_size(None), size, 100) >= 1
    assert count_checkpoints(RolloutConfig(state_cache_gb=enough), size) >= 1
    assert enough < size / 2**30 + 1e-6


@pytest.mark.parametrize("value", [0, -4, 3, 12, True, 16.0, "16"])
def test_a_wrong_block_size_is_told_of_powers_of_two(value: object) -> None:
    with pytest.raises(ValueError, match=r"block_size must be a power of two \(1, 2, 4, \.\.\.\) or None, got "):
        RolloutConfig(block_size=value)


def test_dtypes() -> None:
    assert RolloutConfig(dtype="bfloat16").torch_dtype() is torch.bfloat16
    assert RolloutConfig(dtype=torch.float32).torch_dtype() is torch.float32
    assert RolloutConfig(dtype="auto").torch_dtype() is None


LIMITS = RequestLimits(vocab_size=50, max_model_len=20, block_size=4, num_blocks=4, has_tokenizer=False)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        ("text", "list of token ids, got str"),
        ([1, True], r"prompt\[1\] is True"),
        ([1.0], r"prompt\[0\] is 1.0"),
        ([1, 50], r"50 is outside the vocabulary \(0 to 49\)"),
        ([-1], "-1 is outside"),
        ([2**70], r"prompt\[0\] is 1180591620717411303424, which does not fit in 64 bits"),
        ([1, np.uint64(2**63)], r"prompt\[1\] is 9223372036854775808, which does not fit in 64 bits"),
        (np.array([1, 2**63], np.uint64), r"id 9223372036854775808 is outside the vocabulary \(0 to 49\)"),
        ([1] * 20, "20 tokens; at most 19"),
        (torch.ones(3, dtype=torch.int64), "got Tensor"),
        (np.ones(3), "float64"),
        (np.ones((1, 3), np.int64), "2 dimensions"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_cause(prompt: object, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        LIMITS.check_prompt(prompt)


def test_good_prompts_become_int64() -> None:
    for prompt in ([3, 4], (3, 4), [np.int32(3), 4], np.array([3, 4], np.uint16)):
        ids = LIMITS.check_prompt(prompt)
        assert (ids.dtype, ids.tolist()) == (np.int64, [3, 4])


@pytest.mark.parametrize(
    ("params", "length", "says"),
    [
        (SamplingParams(max_tokens=16), 5, "at most 15"),
        (SamplingParams(max_tokens=13), 5, "needs 5 KV blocks of 4 tokens, .* max_tokens may be at most 12"),
        (SamplingParams(max_tokens=2), 16, "the pool has 4; max_tokens may be at most 1"),
        (SamplingParams(max_tokens=None), 10, "can never fit"),
        (SamplingParams(max_tokens=None, min_tokens=12), 10, "min_tokens=12, but at most 10"),
        (SamplingParams(stop_token_ids=[50]), 1, "stop_token_ids has"),
        (SamplingParams(logit_bias={99: 1.0}), 1, "logit_bias has"),
        (SamplingParams(logprobs=51), 1, "logprobs=51"),
        (SamplingParams(prompt_logprobs=51), 1, "prompt_logprobs=51"),
        (SamplingParams(stop="x"), 1, "tokenizer"),
        ({"n": 1}, 1, "SamplingParams, got dict"),
    ],
)
def test_parameters_that_this_worker_can_not_serve(params: SamplingParams, length: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        LIMITS.check_params(params, length)


def test_the_longest_request_that_fits_is_accepted() -> None:
    assert LIMITS.check_params(SamplingParams(max_tokens=12), 5) == 12
    wide = RequestLimits(vocab_size=50, max_model_len=20, block_size=4, num_blocks=5, has_tokenizer=False)
    assert wide.check_params(SamplingParams(max_tokens=None), 5) == 15


def test_the_block_size_suits_the_model() -> None:
    assert RolloutConfig().with_block_size(None).block_size == 16
    assert RolloutConfig().with_block_size(64).block_size == 64
    assert RolloutConfig(block_size=128).with_block_size(64).block_size == 128
    with pytest.raises(ValueError, match=r"multiple of the model's SSM chunk \(64\), got 32"):
        RolloutConfig(block_size=32).with_block_size(64)


def test_the_number_of_cached_states(caplog: pytest.LogCaptureFixture) -> None:
    assert count_checkpoints(RolloutConfig(state_cache_gb=0.5), 2**20) == 512
    assert count_checkpoints(RolloutConfig(), 2**20) == 256
    assert count_checkpoints(RolloutConfig(), 2**40) == 1
    assert count_checkpoints(RolloutConfig(enable_prefix_caching=False), 2**20) == 0
    assert count_checkpoints(RolloutConfig(), 0) == 0
    with pytest.raises(ValueError, match=r"state of 1048576 bytes; at least 0\.000977 are needed"):
        count_checkpoints(RolloutConfig(state_cache_gb=0.0001), 2**20)
    with pytest.raises(ValueError, match="no recurrent layers"):
        count_checkpoints(RolloutConfig(state_cache_gb=1), 0)
    assert not caplog.records
    assert count_checkpoints(RolloutConfig(state_cache_gb=0), 2**20) == 0
    assert "saves memory, not computing" in caplog.text


@given(size=st.one_of(st.integers(1, 2**24), st.integers(1, 2**38)))
@example(size=1_100_000)
@example(size=2**24)
def test_the_smallest_budget_that_is_named_holds_a_state(size: int) -> None:
    with pytest.raises(ValueError, match="at least") as caught:
        count_checkpoints(RolloutConfig(state_cache_gb=1e-12), size)
    named = re.search(r"at least ([\d.]+) are needed", str(caught.value))
    assert named is not None
    assert count_checkpoints(RolloutConfig(state_cache_gb=float(named[1])), size) >= 1
    assert float(named[1]) - size / 2**30 < 1.0001e-6


@pytest.mark.parametrize("bad", [{"state_cache_gb": -1}, {"state_cache_gb": "1"}, {"state_cache_gb": float("nan")}])
def test_a_bad_budget_for_states(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="state_cache_gb must be a number of at least 0"):
        RolloutConfig(**bad)
    with pytest.raises(ValueError, match="needs enable_prefix_caching"):
        RolloutConfig(state_cache_gb=1, enable_prefix_caching=False)
