"""Whole models run on the Triton kernels: the training forward, its gradients and a rollout, beside the CPU's.

On a GPU and under `make soak` all of it; otherwise less of a smaller model, for the interpreter is slow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind, token_logprobs
from samebit.kernels.layout import device
from samebit.kernels.layout.transfer import Tensors
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.runner import cuda_graphs as step_graphs
from samebit.rollout.runner.cuda_graphs import StepGraph
from samebit.rollout.runner.cuda_step_arrays import StepArrays

from ...exactness.families import CAMPAIGN, KIMI, make_model
from .gpu import DEVICE

WHOLE = CAMPAIGN or DEVICE == "cuda"
long = pytest.mark.skipif(not WHOLE, reason="make soak: many steps in the interpreter")
GEMMAS = ("Gemma3", "Gemma4, inputs of layers, shared keys", "Gemma4, experts")
OTHERS = ("Glm4", "GptOss", "NemotronH, experts", "Qwen3_5", "SmolLM3", "Ministral3", "Lfm2", *KIMI)
NAMES = ("NemotronH", *GEMMAS, *OTHERS) if WHOLE else ("NemotronH",)
SMALLER = {
    "NemotronH": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 2},
}


@contextmanager
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute with Triton: on a machine without a GPU its interpreter computes on the CPU's tensors."""
    with monkeypatch.context() as patch:
        patch.setattr(device, "on_gpu", lambda tensor: tensor.device.type == DEVICE)
        Repeating.recorded.clear()
        if DEVICE == "cpu":
            patch.setattr(step_graphs, "CudaRecorder", Repeating)
        yield


def small(name: str) -> PreTrainedModel:
    other = {"max_position_embeddings": 2048} if WHOLE else SMALLER[name]
    return make_model(name, torch.float32, vocab_size=100, hidden_size=100, intermediate_size=129, **other)


def gradients(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities, and the gradients of all parameters in one vector."""
    model.zero_grad()
    scores = token_logprobs(model, ids, attention_mask=mask, temperature=0.7)
    scores.sum().backward()
    parts = [part.grad.flatten().cpu() for part in model.parameters() if part.grad is not None]
    return scores.detach().cpu(), torch.cat(parts)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_training_is_near_that_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bind(small(name))
    ids = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 18:] = 0
    expected, expected_gradient = gradients(model, ids, mask)
    with triton(monkeypatch):
        model.to(DEVICE)
        found, gradient = gradients(model, ids.to(DEVICE), mask.to(DEVICE))
    assert torch.allclose(found, expected, atol=2e-4)
    assert (gradient - expected_gradient).norm() <= 1e-3 * expected_gradient.norm()


class Repeating:
    """Stands in for a CUDA graph: computes anew what was recorded, from the same buffers into the same place."""

    recorded: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.recorded.append(run)
        return run


def config(enforce_eager: bool, async_scheduling: bool | None = None) -> RolloutConfig:
    return RolloutConfig(
        block_size=64, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, device=DEVICE,
        enforce_eager=enforce_eager, async_scheduling=async_scheduling, kv_cache_gb=0.05 if DEVICE == "cuda" else None,
    )  # fmt: skip


def generated(model: PreTrainedModel, enforce_eager: bool) -> list[RequestOutput]:
    with RolloutWorker(model, config=config(enforce_eager)) as worker:
        return worker.generate(PROMPTS, PARAMS)


PROMPTS = [[5], list(range(3, 22)), list(range(3, 20))]
PARAMS = [
    SamplingParams(seed=1, max_tokens=3, prompt_logprobs=0),
    SamplingParams(seed=2, max_tokens=3, temperature=0.7, top_p=0.9, top_k=50, n=2),
    SamplingParams(seed=3, max_tokens=3, temperature=0.0, repetition_penalty=1.2),
]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_is_near_training_with_graphs_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps from buffers with room for more have the bits of those without graphs, and are near training."""
    model = bind(small(name), ssm_chunk=16).to(DEVICE)
    with triton(monkeypatch):
        eager = generated(model, enforce_eager=True)
        assert not Repeating.recorded
        outputs = generated(model, enforce_eager=False)
        assert DEVICE == "cuda" or 4 <= len(Repeating.recorded) <= 6, "decodes of 1, 2 and 4, and a size once"
        for one, other in zip(outputs, eager, strict=True):
            assert [vars(sample) for sample in one.samples] == [vars(sample) for sample in other.samples]
        for out, asked in zip(outputs, PARAMS, strict=True):
            for sample in out.samples:
                ids = torch.tensor([out.prompt_token_ids + sample.token_ids], device=DEVICE)
                scores = token_logprobs(model, ids, temperature=asked.temperature or 1.0)[0].detach().cpu()
                own = scores[-len(sample.token_ids) :]
                if DEVICE == "cuda":
                    assert torch.equal(own, torch.tensor(sample.logprobs))
                assert torch.allclose(own, torch.tensor(sample.logprobs), atol=2e-4)


@pytest.mark.soak
def test_steps_with_guesses_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with guesses are replayed where one sequence runs at once, with the bits of those without graphs."""
    model = bind(small("NemotronH"), ssm_chunk=16).to(DEVICE)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    found, rows, replay = [], [], StepGraph.replay

    def spied(self: StepGraph, arrays: StepArrays, drawn: torch.Tensor | None) -> tuple[Tensors, torch.Tensor]:
        rows.append(len(arrays.draw_rows))
        return replay(self, arrays, drawn)

    monkeypatch.setattr(StepGraph, "replay", spied)
    with triton(monkeypatch):
        for eager in (True, False):
            guesses = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}
            guessing = replace(config(eager), max_num_seqs=1, kv_cache_gb=0.05, **guesses)
            with RolloutWorker(model, config=guessing) as worker:
                outputs = [worker.generate([[5, 6, 7]], params)[0] for _ in range(2)]  # the second time it is known
                found.append([vars(out.samples[0]) for out in outputs])
                assert worker.stats()["draft_tokens_accepted"]
    assert max(rows) > 1
    assert found[0] == found[1]


@pytest.mark.soak
@long
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_decodes_that_are_launched_ahead_take_their_tokens_from_the_device(
    enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bind(small("NemotronH"), ssm_chunk=16).to(DEVICE)
    prompts = [[5], [8, 9, 10], list(range(3, 16))]
    params = [SamplingParams(seed=seed, max_tokens=5 - seed) for seed in range(3)]
    outputs = []
    with triton(monkeypatch):
        for ahead in (False, True):
            with RolloutWorker(model, config=config(enforce_eager, async_scheduling=ahead)) as worker:
                outputs.append(worker.generate(prompts, params))
                assert bool(worker.stats()["steps_ahead"]) == ahead
    for one, other in zip(*outputs, strict=True):
        assert vars(one.samples[0]) == vars(other.samples[0])


@long
@pytest.mark.soak
@pytest.mark.parametrize(("lengths", "kept"), [((67, 66, 3), {0, 1, 2}), ((1100, 530, 3), {0, 1, 3})])
def test_samples_that_share_blocks_in_graphs_and_without(
    lengths: tuple[int, ...], kept: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs change no bit of samples that share blocks: one replays other groups and splits than it was recorded with,
    and none, as samples end one after the other.
    """
    model = bind(small("Gemma3")).to(DEVICE)
    prompts = [[3 + (seed + place) % 90 for place in range(length)] for seed, length in enumerate(lengths)]
    params = [SamplingParams(seed=seed, n=2, max_tokens=seed + 4, ignore_eos=True) for seed in range(3)]
    found, groups, replay = [], [], StepGraph.replay

    def spied(self: StepGraph, arrays: StepArrays, drawn: torch.Tensor | None) -> tuple[Tensors, torch.Tensor]:
        groups.append(sum(len(array) for name, array in arrays.layout.items() if name.startswith("kept")))
        return replay(self, arrays, drawn)

    monkeypatch.setattr(StepGraph, "replay", spied)
    with triton(monkeypatch):
        for eager in (True, False):
            longest = max(lengths) + 29
            wide = replace(config(eager), max_num_seqs=6, max_num_batched_tokens=128, max_model_len=longest)
            with RolloutWorker(model, config=wide) as worker:
                found.append(worker.generate(prompts, params))
    assert kept <= set(groups)
    model.cpu()
    for one, other, prompt in zip(*found, prompts, strict=True):
        assert [vars(sample) for sample in one.samples] == [vars(sample) for sample in other.samples]
        for sample in one.samples:
            expected = token_logprobs(model, torch.tensor([prompt + sample.token_ids]))[0].detach()
            assert torch.allclose(expected[-len(sample.token_ids) :], torch.tensor(sample.logprobs), atol=2e-4)


@long
@pytest.mark.soak
def test_graphs_are_recorded_anew_when_what_they_read_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs hold addresses, so they are recorded anew when pages have slept, or weights are elsewhere."""
    model = bind(small("Gemma3")).to(DEVICE)
    requests = [[5, 6, 7], [8, 9, 10]], SamplingParams(temperature=0.0, max_tokens=3)
    with triton(monkeypatch), RolloutWorker(model, config=config(enforce_eager=False)) as worker:
        first = worker.generate(*requests)
        assert worker.generate(*requests)[0].samples[0].logprobs == first[0].samples[0].logprobs
        at_start = len(Repeating.recorded)
        worker.sleep("kv_cache")
        worker.wake_up()
        assert worker.generate(*requests)[0].samples[0].logprobs == first[0].samples[0].logprobs
        anew = len(Repeating.recorded) - at_start
        assert DEVICE == "cuda" or anew == 2, "prompts, and decodes of both"
        with worker.weight_update():
            norm = model.model.norm.weight
            norm.data = norm.data + 0.5
        moved = worker.generate(*requests)[0]
        assert DEVICE == "cuda" or len(Repeating.recorded) == at_start + 2 * anew
        with worker.weight_update():
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
        assert worker.generate(*requests)[0].samples[0].logprobs == moved.samples[0].logprobs
        assert DEVICE == "cuda" or len(Repeating.recorded) == at_start + 3 * anew
        hook = model.model.layers[0].register_forward_hook(lambda module, given, out: out + 0.5)
        hooked = worker.generate(*requests)[0]
        assert hooked.samples[0].logprobs != moved.samples[0].logprobs, "what a hook adds is computed"
        hook.remove()
        assert worker.generate(*requests)[0].samples[0].logprobs == moved.samples[0].logprobs
        assert DEVICE == "cuda" or len(Repeating.recorded) == at_start + 5 * anew
        model.train().gradient_checkpointing_enable()
        assert worker.generate(*requests)[0].samples[0].logprobs == moved.samples[0].logprobs
        assert DEVICE == "cuda" or len(Repeating.recorded) == at_start + 5 * anew, "such layers can not be recorded"
        ids = torch.tensor([moved.prompt_token_ids + moved.samples[0].token_ids], device=DEVICE)
        scores = token_logprobs(model, ids)[0, -3:].detach().cpu()
    assert torch.allclose(scores, torch.tensor(moved.samples[0].logprobs), atol=2e-4)
    assert moved.samples[0].logprobs != first[0].samples[0].logprobs
