"""Workers on the trainer's own module stay exact: weights change untold, several workers share them, reports tell."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from samebit.kernels import bind, token_logprobs
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

from ..campaign import in_pairs
from .families import make_model

PROMPTS = [list(range(1, 70)), [*range(1, 41), 7, 8, 9]]
PARAMS = SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=3)
CONFIG = {"num_blocks": 64, "max_model_len": 128, "max_num_seqs": 8}


def assert_exact(outputs: Sequence[RequestOutput], models: Mapping[int, nn.Module], *, since: int = 0) -> None:
    """Check that every token has the log-probability that the model of its version computes."""
    for output in outputs:
        for sample in output.samples:
            assert sample.context_versions == sample.weight_versions
            ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
            for start, end, version in sample.weight_versions:
                assert version >= since
                with torch.no_grad():
                    expected = token_logprobs(models[version], ids)[0, -len(sample.token_ids) :]
                assert torch.equal(expected[start:end], torch.tensor(sample.logprobs[start:end]))


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    token_logprobs(policy, torch.tensor([PROMPTS[0]])).mean().neg().backward()
    optimizer.step()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = (record for record in caplog.records if record.name.startswith("samebit"))
    return [record.message for record in own if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("family", ["Qwen3", "NemotronH"])
def test_an_optimizer_that_steps_untold_between_rollouts(family: str, caplog: pytest.LogCaptureFixture) -> None:
    policy = make_model(family)
    with RolloutWorker(policy, config=RolloutConfig(**CONFIG)) as worker:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        for version in range(3):
            outputs = worker.generate(PROMPTS, PARAMS)
            assert_exact(outputs, {version: policy}, since=version)
            assert outputs[0].num_cached_tokens == 0
            assert worker.weight_version == version
            learn(policy, optimizer)
    (warning,) = warnings_in(caplog)
    assert "with worker.weight_update()" in warning


@pytest.mark.soak
@pytest.mark.parametrize(("family", "step", "ahead"), in_pairs(["Qwen3", "NemotronH"], [0, 1, 5], [False, True]))
def test_weights_that_change_in_the_middle_of_a_forward(family: str, step: int, ahead: bool) -> None:
    """No token is reported of a forward in whose middle weights change: a first layer of the old ones under a second
    one of the new ones.
    """
    policy = bind(make_model(family))
    models = {0: copy.deepcopy(policy)}
    forwards = 0

    def change(module: nn.Module, given: Any) -> None:
        nonlocal forwards
        if forwards == step:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.5)
        forwards += 1

    with RolloutWorker(policy, config=RolloutConfig(**CONFIG, async_scheduling=ahead)) as worker:
        handle = policy.model.layers[1].register_forward_pre_hook(change)
        outputs = worker.generate(PROMPTS, PARAMS)
        handle.remove()
        models[1] = policy
        assert_exact(outputs, models)
        assert all(sample.weight_versions[-1][2] == 1 for output in outputs for sample in output.samples)
        again = worker.generate(PROMPTS, PARAMS)
        assert_exact(again, models, since=1)
        assert worker.stats()["untold_updates"] == worker.weight_version == 1


@pytest.mark.parametrize("source", ["in place", "a dict"])
def test_an_update_through_one_of_two_workers_is_seen_by_both(source: str, caplog: pytest.LogCaptureFixture) -> None:
    policy = make_model("Qwen3")
    with (
        RolloutWorker(policy, config=RolloutConfig(**CONFIG)) as one,
        RolloutWorker(policy, config=RolloutConfig(**CONFIG)) as other,
    ):
        for version in range(3):
            for worker in (one, other):
                assert_exact(worker.generate(PROMPTS, PARAMS), {version: policy}, since=version)
            if source == "in place":
                with one.weight_update(), torch.no_grad():
                    policy.model.embed_tokens.weight.mul_(1.1)
            else:
                other.receive_weights({name: tensor * 1.1 for name, tensor in policy.state_dict().items()})
            one, other = other, one
        assert one.stats()["untold_updates"] == other.stats()["untold_updates"] == 0
    assert not warnings_in(caplog)


def test_a_fused_optimizer_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    """A fused optimizer's step is measured, though it writes without torch's counting it: what a report says comes from
    values.
    """
    policy = make_model("Qwen3")
    with RolloutWorker(policy, config=RolloutConfig(**CONFIG)) as worker:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True)
        learn(policy, optimizer)
        worker.receive_weights()
        for version in (2, 3):
            worker.generate(PROMPTS, PARAMS)
            writes = [parameter._version for parameter in policy.parameters()]
            before = copy.deepcopy(policy.state_dict())
            with worker.weight_update() as update:
                learn(policy, optimizer)
            assert writes == [parameter._version for parameter in policy.parameters()]
            changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
            assert update.report.changed
            assert set(update.report.changed) <= changed
            assert update.report.changed_tensors > 20
            assert_exact(worker.generate(PROMPTS, PARAMS), {version: policy}, since=version)
    assert not warnings_in(caplog)


def test_a_report_does_not_say_that_nothing_changed(caplog: pytest.LogCaptureFixture) -> None:
    policy = make_model("Qwen3")
    with RolloutWorker(policy, config=RolloutConfig(**CONFIG)) as worker:
        with worker.weight_update() as update:
            policy.model.embed_tokens.weight.data[500, 77] += 1  # one value, and not one of the sample
        for report in (update.report, worker.receive_weights(), worker.receive_weights(policy)):
            assert (report.changed, report.changed_tensors, report.bytes) == (None, None, None)
        with worker.weight_update() as update, torch.no_grad():
            policy.model.norm.weight.data.mul_(2)
            policy.model.layers[0].input_layernorm.weight.mul_(2)
        assert set(update.report.changed) == {"model.norm.weight", "model.layers.0.input_layernorm.weight"}
        assert update.report.bytes == 2 * 4 * policy.config.hidden_size
    assert not warnings_in(caplog)
