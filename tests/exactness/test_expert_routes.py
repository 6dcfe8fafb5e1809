"""`routed_experts` of samples are the experts that the trainer's forward chooses, whatever was cached or preempted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from samebit.kernels import token_logprobs
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.experts.routes import RouteList, use_notes
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import RequestError

from .families import EXPERTS, bound_model, make_model, paired, token_ids

Routes = npt.NDArray[np.int16]
ASKED = SamplingParams(n=2, max_tokens=9, seed=3, ignore_eos=True, return_routed_experts=True)


def trainers_routes(model: nn.Module, ids: list[int]) -> Routes:
    """Return the trainer's choice, `[tokens, layers, top_k]`."""
    notes = RouteList()
    with use_notes(notes):
        token_logprobs(model, torch.tensor([ids]))
    layout = binding_of(model).route_layout
    assert layout is not None
    return notes.of_rows(layout)


def check_all(model: nn.Module, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for sample in output.samples:
            ids = output.prompt_token_ids + sample.token_ids
            assert sample.routed_experts is not None
            assert sample.routed_experts.dtype == np.int16
            np.testing.assert_array_equal(sample.routed_experts, trainers_routes(model, ids)[: len(ids) - 1])


@pytest.mark.parametrize(("family", "dtype"), paired(EXPERTS, (torch.float32, torch.bfloat16)))
def test_every_family_cold_and_warm(family: str, dtype: torch.dtype) -> None:
    """The experts of every family, in chunks, with blocks that are shared, copied and hit, are those of the trainer's
    one forward.
    """
    model = bound_model(family, dtype)
    layout = binding_of(model).route_layout
    assert layout is not None
    config = RolloutConfig(max_num_batched_tokens=40, max_num_seqs=4, max_model_len=160)
    with RolloutWorker(model, config=config) as worker:
        prompts = token_ids(70, 3, 129)
        for expects_hits in (False, True):
            outputs = worker.generate(prompts, ASKED)
            check_all(model, outputs)
            assert bool(outputs[2].num_cached_tokens) is expects_hits
        found = outputs[0].samples[0].routed_experts
        assert found is not None
        assert found.shape == (70 + 8, layout.num_layers, layout.top_k)
        dense = [layer for layer in range(layout.num_layers) if layer not in layout.layers]
        assert not found[:, dense].any()
        assert bool((np.diff(found[:, list(layout.layers)], axis=2) > 0).all()), "in ascending order, none twice"


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_cached_before_anybody_asked_is_computed_again(ahead: bool) -> None:
    """What was cached before anybody asked for its experts is computed again, also while other requests run, and with
    steps launched ahead; those who do not ask get nothing.
    """
    model = bound_model("Qwen3Moe", torch.bfloat16)
    with RolloutWorker(model, config=RolloutConfig(async_scheduling=ahead, block_size=8)) as worker:
        (prompt,) = token_ids(50)
        plain = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
        running = worker.submit(prompt, plain)
        next(iter(running))
        outputs = worker.generate([prompt, prompt[:20]], ASKED)
        check_all(model, outputs)
        first = running.result()
        assert first.samples[0].routed_experts is None
        assert worker.generate([prompt], ASKED)[0].num_cached_tokens == 48
        again = worker.generate([prompt], plain)[0]
        assert again.num_cached_tokens == 48
        assert (again.samples[0].token_ids, again.samples[0].logprobs) == (
            first.samples[0].token_ids,
            first.samples[0].logprobs,
        )
        check_all(model, worker.generate([first.prompt_token_ids + first.samples[0].token_ids], ASKED))


def test_preemption_first_tokens_and_sleep() -> None:
    model = bound_model("Glm4Moe", torch.float32)
    with RolloutWorker(model, config=RolloutConfig(block_size=4, num_blocks=28, max_model_len=90)) as worker:
        prompts = token_ids(30, 31, 33, 5)
        check_all(model, worker.generate(prompts, ASKED))
        assert worker.stats()["preemptions"] > 0
        one = SamplingParams(n=3, max_tokens=1, return_routed_experts=True)
        check_all(model, worker.generate(prompts[:1], one))
        worker.sleep("kv_cache")
        worker.wake_up()
        check_all(model, worker.generate(prompts, ASKED))


def test_an_aborted_sample_has_what_it_had_computed() -> None:
    model = bound_model("Qwen3Moe", torch.bfloat16)
    with RolloutWorker(model, config=RolloutConfig(max_num_seqs=1)) as worker:
        prompts = token_ids(20, 30)
        long = SamplingParams(max_tokens=200, seed=3, ignore_eos=True, return_routed_experts=True)
        running, waiting = worker.submit_all(prompts, [long, long])
        next(iter(running))
        worker.abort([running.request_id, waiting.request_id])
        sample, idle = running.result().samples[0], waiting.result().samples[0]
        assert sample.finish_reason == idle.finish_reason == "abort"
        assert sample.routed_experts is not None
        ids = prompts[0] + sample.token_ids
        np.testing.assert_array_equal(sample.routed_experts, trainers_routes(model, ids)[: len(ids) - 1])
        assert idle.routed_experts is not None
        assert len(idle.routed_experts) == 0


@pytest.mark.parametrize("command", ["cancel", "pause"])
def test_an_abort_while_the_cache_sleeps_gives_none_and_the_worker_goes_on(command: str) -> None:
    model = bound_model("Qwen3Moe", torch.bfloat16)
    with RolloutWorker(model) as worker:
        long = SamplingParams(max_tokens=200, seed=3, ignore_eos=True, return_routed_experts=True)
        running = worker.submit(token_ids(20)[0], long)
        next(iter(running))
        worker.sleep("kv_cache")
        if command == "cancel":
            running.cancel()
        else:
            worker.pause("abort")
        sample = running.result().samples[0]
        assert sample.finish_reason == "abort"
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == 0
        worker.wake_up()
        worker.resume()
        check_all(model, worker.generate(token_ids(5), ASKED))


def test_an_abort_before_the_first_step_that_notes_gives_none() -> None:
    with RolloutWorker(bound_model("Qwen3Moe", torch.bfloat16)) as worker:
        worker.pause()
        waiting = worker.submit(token_ids(20)[0], ASKED)
        waiting.cancel()
        found = waiting.result().samples[0].routed_experts
        assert found is not None
        assert len(found) == 0


def test_after_an_update_they_are_of_the_weights_that_computed_them() -> None:
    """The experts are, after an update, of the weights that computed them: a correction bias that changes inside
    `weight_update()` moves tokens to other experts, and is seen to change.
    """
    from samebit.kernels import bind

    model = bind(make_model("Glm4Moe", torch.bfloat16))
    router = model.get_submodule("model.layers.1.mlp.gate")
    with RolloutWorker(model) as worker:
        prompts = token_ids(60, 9)
        before = worker.generate(prompts, ASKED)
        with worker.weight_update() as update:
            router.e_score_correction_bias += torch.linspace(-0.3, 0.3, 15)
        assert update.report is not None
        assert update.report.changed == ("model.layers.1.mlp.gate.e_score_correction_bias",)
        after = worker.generate(prompts, ASKED)
        check_all(model, after)
        assert not np.array_equal(_first(before)[:, 1], _first(after)[:, 1])
        router.e_score_correction_bias.zero_()  # not told
        untold = worker.generate(prompts, ASKED)
        check_all(model, untold)
        assert worker.stats()["untold_updates"] == 1
        for output in untold:
            for sample in output.samples:
                ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
                expected = token_logprobs(model, ids)[0, -len(sample.token_ids) :]
                assert torch.equal(torch.tensor(sample.logprobs), expected)


def _first(outputs: list[RequestOutput]) -> Routes:
    found = outputs[0].samples[0].routed_experts
    assert found is not None
    return found[:60]


@pytest.mark.parametrize(("family", "changes"), [("Qwen3", {}), ("Qwen3Moe", {"exact": False})])
def test_a_model_without_routers_of_ours_refuses(family: str, changes: dict[str, Any]) -> None:
    with (
        RolloutWorker(make_model(family), config=RolloutConfig(**changes)) as worker,
        pytest.raises(RequestError, match="return_routed_experts=True needs a model with routed experts"),
    ):
        worker.generate([[1, 2]], ASKED)


def test_nothing_is_noted_unless_it_is_asked_for() -> None:
    model = bound_model("Qwen3Moe", torch.bfloat16)
    with RolloutWorker(model) as worker:
        worker.generate(token_ids(9), SamplingParams(max_tokens=3))
        memory = worker._engine.runner.memory
        assert memory.routes is None
        worker.generate(token_ids(9), ASKED)
        worker.generate(token_ids(9), ASKED)
        assert worker._engine.runner.memory.routes is not None
        assert worker._engine.runner.memory.pages is memory.pages
