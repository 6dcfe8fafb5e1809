"""Check that weights give the same bits however they arrived, slept, or changed under running requests.

Two sets of weights: W1 are the model's, W2 a half of them. Each run begins with a worker that has W2, and a
prefix cache full of what must not be hit afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from samebit.kernels import token_logprobs
from samebit.kernels.binding.binding import binding_of
from samebit.rollout.audit.compare import Difference, compare, compare_samples, reported, worst
from samebit.rollout.audit.sending_process import TIMEOUT, SendingProcess
from samebit.rollout.audit.trainer_layouts import Sample, packed
from samebit.rollout.audit.workers import GUESSING, LEAST_GUESSED, compared_config, device_of, guesses_of
from samebit.rollout.control.weights.transaction import IN_FLIGHT
from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.models.saving import save_model
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, WeightStream, apply_weights
from samebit.weight_sync.folder_names import FolderNames

CYCLES = 100
STEPS = 50
SPILL_BYTES = 8 << 30
"""The most bytes that the sleeps of one check write to disk; a large model's weights sleep less often."""
TRAINED_BYTES = 2 << 30
"""The most bytes of weights that are trained for deltas: gradients and the optimizer take three times as many."""
CAUGHT_TOKENS = 64
ATTEMPTS = 5

Requests = tuple[list[list[int]], list[SamplingParams]]


@dataclass(frozen=True)
class Run:
    """Holds outputs of the requests under W1, those they must equal if any, and what was compared beside them."""

    name: str
    outputs: list[RequestOutput]
    first: list[RequestOutput] | None = None
    beside: Difference = (0, 0, 0.0)


class WeightsCheck:
    """Checks updates and sleeps against `first`, what the requests gave under the first schedule."""

    def __init__(self, model: nn.Module, requests: Requests, first: list[RequestOutput], max_model_len: int) -> None:
        self._model = model
        self._other = copy.deepcopy(model)
        self._halve()
        self._prompts, self._params = requests
        self._first = first
        self._max_model_len = max_model_len
        self._config = compared_config(model, max_model_len=max_model_len)
        self._long = min(CAUGHT_TOKENS, max_model_len // 2)

    def runs(self) -> Iterator[Run]:
        """Yield a run for each way in which weights arrive, sleep or change.

        Raises:
            ValueError: nothing could be caught in flight, the other process did not start, or deltas save nothing.
        """
        with TemporaryDirectory(prefix="samebit-check-") as name:
            folder = Path(name)
            (folder / "sent").mkdir()
            save_model(cast(PreTrainedModel, self._model), folder)
            with (
                SendingProcess(self._model, folder / "sent") as process,
                closing(RolloutWorker(folder, config=self._config)) as worker,
            ):
                yield Run("weights saved and loaded again", self._generate(worker), self._first)
                yield from self._arrivals(worker, folder, process)
                yield self._sleeps(worker)
                for mode in IN_FLIGHT:
                    yield self._update_in_flight(worker, mode)
                yield self._deltas(worker)
            if binding_of(self._model).state_layout is None and (self._params[0].max_tokens or 0) >= LEAST_GUESSED:
                yield self._guessed_by(folder)

    def _guessed_by(self, folder: Path) -> Run:
        """Generate with the same weights as a draft model: of greedy requests, all of its guesses are right."""
        by_model = {"draft_model": folder, "prompt_lookup_min": self._max_model_len, "speculative_history_tokens": 0}
        config = compared_config(self._model, max_model_len=self._max_model_len, **GUESSING, **by_model)
        with RolloutWorker(self._model, config=config) as worker:
            greedy = worker.generate(self._prompts, [replace(one, temperature=0.0) for one in self._params])
            outputs = self._generate(worker)
            name = f"tokens guessed ahead by its copy, {guesses_of(worker)}"
        samples = [Sample(out.prompt_token_ids, sample.token_ids) for out in greedy for sample in out.samples]
        return Run(name, outputs, self._first, compare(reported(greedy), packed(self._model, samples, 1.0)))

    def _arrivals(self, worker: RolloutWorker, folder: Path, process: SendingProcess) -> Iterator[Run]:
        with RolloutWorker(self._other, config=self._config) as shared:
            self._generate(shared)
            with shared.weight_update():
                apply_weights(self._other, self._model)
            yield self._arrived("on the same module", shared)
        self._halve()
        for way, source in (("from a folder", folder), ("from an iterator", WeightStream.of(self._model))):
            self._use_other(worker)
            worker.receive_weights(source)
            yield self._arrived(way, worker)
        self._use_other(worker)
        with SharedMemoryReceiver(process.address(), timeout=TIMEOUT) as end:
            worker.receive_weights(end)
        yield self._arrived("over shared memory", worker)
        self._use_other(worker)
        with process.broadcast() as end:
            worker.receive_weights(end)
        yield self._arrived("by broadcast", worker)

    def _arrived(self, way: str, worker: RolloutWorker) -> Run:
        return Run(f"weights W1 -> W2 -> W1, {way}", self._generate(worker), self._first)

    def _sleeps(self, worker: RolloutWorker) -> Run:
        """Sleep and wake tag by tag, in every order, with a short request after each cycle."""
        size = sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())
        copies = min(CYCLES, max(1, SPILL_BYTES // size))
        between: list[RequestOutput] = []
        for cycle in range(CYCLES):
            tags = TAGS if cycle < copies else ("kv_cache",)
            for tag in tags[:: -1 if cycle & 1 else 1]:
                worker.sleep(tag)
            for tag in tags[:: -1 if cycle & 2 else 1]:
                worker.wake_up(tag)
            between += worker.generate(self._prompts[:1], replace(self._params[0], max_tokens=1))
        note = "" if copies == CYCLES else f", the weights {copies} times"
        name = f"slept and woken {CYCLES} times{note}"
        return Run(name, self._generate(worker) + between, self._first + between[:1] * CYCLES)

    def _update_in_flight(self, worker: RolloutWorker, mode: str) -> Run:
        """Compare requests that began under W2 and meet W1: every token that is of one version, and what comes
        after."""
        for _ in range(ATTEMPTS):
            self._use_other(worker)
            caught = self._caught(worker, mode)
            if caught is not None:
                beside = self._compare_caught(caught, worker.weight_version)
                return Run(f'weights change under requests, "{mode}"', self._generate(worker), self._first, beside)
        raise ValueError("no request was caught in flight by an update: the model's length is too small to check it")

    def _caught(self, worker: RolloutWorker, mode: str) -> list[RequestOutput] | None:
        """Return the outputs of requests that were running when the weights changed; None if they were too fast."""
        fits = [prompt for prompt in self._prompts if len(prompt) + self._long <= worker.limits.max_model_len]
        params = [SamplingParams(seed=seed, max_tokens=self._long, ignore_eos=True) for seed in range(len(fits))]
        handles = [worker.submit(prompt, wanted) for prompt, wanted in zip(fits, params, strict=True)]
        next(iter(handles[0]))
        stands = mode != "wait"  # which needs a worker that generates
        if stands:
            worker.pause()
        running = not handles[0].done
        worker.receive_weights(self._model, in_flight=mode)
        if stands:
            worker.resume()
        outputs = [handle.result() for handle in handles]
        return outputs if running else None

    def _compare_caught(self, outputs: list[RequestOutput], version: int) -> Difference:
        """Compare with W1 what was sampled under `version`, with W2 what was before; a mixture with neither."""
        result: Difference = (0, 0, 0.0)
        samples = [(out, sample) for out in outputs for sample in out.samples]
        for model, wanted in ((self._model, version), (self._other, version - 1)):
            expected = packed(model, [Sample(out.prompt_token_ids, sample.token_ids) for out, sample in samples], 1.0)
            for (_, sample), row in zip(samples, expected, strict=True):
                places = torch.tensor(
                    [
                        index
                        for start, end, own in sample.weight_versions
                        for context_start, context_end, oldest in sample.context_versions
                        if own == oldest == wanted
                        for index in range(max(start, context_start), min(end, context_end))
                    ],
                    dtype=torch.int64,
                )
                result = worst(result, compare([torch.tensor(sample.logprobs)[places]], [row[places]]))
        return result

    def _deltas(self, worker: RolloutWorker) -> Run:
        """Train W2 and send the changes of each step; in the end send all of it, and compare."""
        optimizer = torch.optim.AdamW(self._trained(), lr=1e-5, weight_decay=0.0)
        ids = torch.tensor([self._prompts[-1]], device=device_of(self._other))
        saves = next(self._other.parameters()).dtype == torch.bfloat16  # in float32 nearly every weight moves
        result: Difference = (0, 0, 0.0)
        with (
            ThreadPoolExecutor(1) as other,  # ends after both ends of the link: until then a send may wait for its peer
            closing(SharedMemorySender(timeout=TIMEOUT)) as sender,
            SharedMemoryReceiver(sender.address, timeout=TIMEOUT) as end,
        ):
            for step in range(STEPS):
                optimizer.zero_grad()
                (-token_logprobs(self._other, ids).mean()).backward()
                optimizer.step()
                sending = other.submit(sender.send, self._other, delta=True)
                report = worker.receive_weights(end)
                sent = sending.result()
                if sent.delta != (step > 0):
                    raise ValueError(f"step {step} did not go as it was to, full first and then as a delta")
                if sent.delta and saves and sent.sent_bytes >= sent.dense_bytes:
                    raise ValueError(f"a delta took {sent.sent_bytes} bytes, where all weights take {sent.dense_bytes}")
                if step % 10 == 0:
                    result = worst(result, self._compare_other(worker.generate(self._prompts[:1], self._params[:1])))
        by_delta = self._generate(worker)
        worker.receive_weights(self._model)
        dense = worker.receive_weights(self._other)
        result = worst(worst(result, self._compare_other(by_delta)), (0, int(dense.digest != report.digest), 0.0))
        result = worst(result, compare_samples(self._generate(worker), by_delta))
        return Run(f"delta against dense, {STEPS} optimizer steps", [], None, result)

    def _trained(self) -> list[nn.Parameter]:
        """Return what W2 trains of its weights: of a large model the first; from then on the others are frozen."""
        of_images = FolderNames.by_use(self._other).computes_images_with  # no gradient of text reaches these
        named = self._other.named_parameters()
        every = [parameter for name, parameter in named if parameter.requires_grad and not of_images(name)]
        sizes = accumulate(parameter.nbytes for parameter in every)
        count = max(1, sum(size <= TRAINED_BYTES for size in sizes))
        for parameter in every[count:]:
            parameter.requires_grad_(False)
        return every[:count]

    def _compare_other(self, outputs: list[RequestOutput]) -> Difference:
        samples = [Sample(out.prompt_token_ids, sample.token_ids) for out in outputs for sample in out.samples]
        return compare(reported(outputs), packed(self._other, samples, 1.0))

    def _use_other(self, worker: RolloutWorker) -> None:
        worker.receive_weights(self._other)
        self._generate(worker)

    def _generate(self, worker: RolloutWorker) -> list[RequestOutput]:
        return worker.generate(self._prompts, self._params)

    @torch.no_grad()
    def _halve(self) -> None:
        apply_weights(self._other, self._model)
        for parameter in self._other.parameters():
            parameter.mul_(0.5)
