"""No token may differ whatever happens on the way: random schedules, prompts, batch mixes and configurations.

Prompts extend a few common stems, so that with prefix caching most of them lead, follow, or hit.

SAMEBIT_SOAK_CASES sets the number of cases.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..patience import HANG
from .compare import assert_matches_trainer, assert_same_samples, budget
from .families import DTYPES, FAMILIES, HYBRIDS, bound_model, token_ids
from .layouts import LAYOUTS, assert_same_bits

CASES = int(os.environ.get("SAMEBIT_SOAK_CASES", "8"))
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 90)
STEMS = token_ids(90, 90, seed=1)
(LONG,) = token_ids(140, seed=2)


@dataclass(frozen=True)
class Wish:
    """Holds a request, what happens right after it was submitted, and whether it is repeated alone at the end."""

    prompt: list[int]
    params: SamplingParams
    event: str
    repeat: bool


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    new = draw(st.integers(1, 10))
    seed = draw(st.one_of(st.none(), st.integers(0, 2**63 - 1)))
    params = SamplingParams(
        n=draw(st.sampled_from((1, 1, 1, 2, 3, 4))),
        temperature=draw(st.sampled_from((1.0, 0.7, 0.0))),
        seed=seed,
        max_tokens=new,
        min_tokens=draw(st.integers(0, new)),
        ignore_eos=draw(st.booleans()),
        top_k=draw(st.sampled_from((0, 0, 1, 7))),
        top_p=draw(st.sampled_from((1.0, 1.0, 0.8))),
        min_p=draw(st.sampled_from((0.0, 0.0, 0.1))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.0, 1.3))),
        prompt_logprobs=draw(st.sampled_from((None, None, None, 0))),
        cache_salt=draw(st.sampled_from((None, None, None, "salt"))),
    )
    length = draw(st.sampled_from(LENGTHS))
    (own,) = token_ids(length, seed=draw(st.integers(0, 1000)))
    prompt = (draw(st.sampled_from(STEMS))[: draw(st.integers(0, length))] + own)[:length]
    event = draw(st.sampled_from(("", "", "", "", "sleep", "abort", "pause", "update", "keep", "reset")))
    return Wish(prompt, params, event, seed is not None and draw(st.booleans()))


@st.composite
def configs(draw: st.DrawFn, block_sizes: tuple[int, ...] = (2, 4, 16, 64)) -> RolloutConfig:
    block_size = draw(st.sampled_from(block_sizes))
    max_num_seqs = draw(st.integers(1, 9))
    fewest = -(-100 // block_size)  # what the longest request needs
    return RolloutConfig(
        block_size=block_size,
        num_blocks=draw(st.integers(fewest, 3 * fewest)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 130)),
        enable_prefix_caching=draw(st.sampled_from((True, True, True, False))),
        eviction_policy=draw(st.sampled_from(("lru", "ref_zero"))),
        seed=draw(st.integers(0, 5)),
        async_scheduling=draw(st.booleans()),
    )


def disturb(worker: RolloutWorker, event: str, request_id: str) -> None:
    if event == "sleep":
        worker.sleep("kv_cache")
        worker.wake_up()
    elif event == "abort":
        worker.abort(request_id)
    elif event == "pause":
        worker.pause()
        worker.resume()
    elif event == "reset":
        worker.reset_prefix_cache()
    elif event in ("update", "keep"):
        with worker.weight_update(in_flight="keep" if event == "keep" else "recompute"):
            pass  # the same weights: kept or computed again, the bits are the same


campaign = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=CASES <= 15,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
requests = st.lists(wishes(), min_size=1, max_size=6)
layouts = st.sampled_from(tuple(LAYOUTS))


@pytest.mark.soak
@campaign
@given(
    family=st.sampled_from(FAMILIES), dtype=st.sampled_from(DTYPES), config=configs(), asked=requests, layout=layouts
)
def test_no_token_differs(
    family: str, dtype: torch.dtype, config: RolloutConfig, asked: list[Wish], layout: str
) -> None:
    check_schedule(bound_model(family, dtype), config, asked, layout)


@pytest.mark.soak
@campaign
@given(
    family=st.sampled_from(HYBRIDS),
    dtype=st.sampled_from(DTYPES),
    config=configs(block_sizes=(16, 32, 64)),
    chunk=st.sampled_from((16, 16, 64)),
    stem=st.sampled_from((0, 0, 0, 140)),
    checkpoints=st.sampled_from((0, 1, 2, 50)),
    asked=requests,
    layout=layouts,
)
def test_no_token_differs_in_hybrids(
    family: str,
    dtype: torch.dtype,
    config: RolloutConfig,
    chunk: int,
    stem: int,
    checkpoints: int,
    asked: list[Wish],
    layout: str,
) -> None:
    """No token differs in hybrids: mostly with chunks of 16 tokens, so that short prompts have several; sometimes all
    begin with a long stem.
    """
    model = bound_model(family, dtype, ssm_chunk=chunk)
    size = max(config.block_size, chunk)
    config = replace(config, block_size=size, num_blocks=config.num_blocks + -(-stem // size), max_model_len=100 + stem)
    if config.enable_prefix_caching:
        config = replace(config, state_cache_gb=budget(model, checkpoints))
    check_schedule(model, config, [replace(wish, prompt=[*LONG[:stem], *wish.prompt]) for wish in asked], layout)


def check_schedule(model: PreTrainedModel, config: RolloutConfig, asked: list[Wish], layout: str) -> None:
    with RolloutWorker(model, config=config) as worker:
        handles = []
        for wish in asked:
            handles.append(worker.submit(wish.prompt, wish.params))
            disturb(worker, wish.event, handles[-1].request_id)
        outputs = [handle.result(timeout=HANG) for handle in handles]
        repeated = [number for number, wish in enumerate(asked) if wish.repeat and wish.event != "abort"]
        for number in repeated:
            again = worker.generate([asked[number].prompt], asked[number].params)
            assert_same_samples(again, [outputs[number]])
    for output, wish in zip(outputs, asked, strict=True):
        assert [s.finish_reason for s in output.samples].count("abort") == 0 or wish.event == "abort"
    assert_matches_trainer(model, outputs, [wish.params for wish in asked], layout)
    scored = [output for output in outputs if output.prompt_logprobs is not None and len(output.prompt_token_ids) > 1]
    with torch.no_grad():
        expected = LAYOUTS[layout](model, [output.prompt_token_ids for output in scored]) if scored else []
    assert_same_bits([torch.tensor(output.prompt_logprobs[1:], dtype=torch.float32) for output in scored], expected)
