"""Put Hugging Face's `generate` in the place of samebit's worker, in verl's servers: for comparing step times.

It has the part of `samebit.rollout.Worker` that verl's server calls. Nothing of it is exact, no tokens are cached
between calls, and an abort waits for the batch that runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import RequestError
from samebit.rollout.integrations.verl.options import ServerOptions
from samebit.rollout.integrations.verl.server.replica import SamebitReplica
from samebit.rollout.integrations.verl.server.server import SamebitServer
from samebit.rollout.outputs import RequestOutput, SampleOutput
from samebit.rollout.requests.limits import RequestLimits
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker_interface import UpdateOptions
from samebit.weight_sync import SyncReport, apply_weights

GATHER_SECONDS = 0.1
"""Requests of a step arrive one by one: a batch begins when none came for so long, or when it is full."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """Holds a request and where its result goes."""

    prompt: list[int]
    params: SamplingParams
    request_id: str
    result: Future[RequestOutput] = field(default_factory=Future)

    async def result_async(self) -> RequestOutput:
        return await asyncio.wrap_future(self.result)


class HuggingFaceWorker:
    """Batches what waits, up to `max_num_seqs` requests of equal parameters, and generates it to the end."""

    def __init__(self, folder: str | Path, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._pad: int = tokenizer.pad_token_id or 0
        self._end: int | None = tokenizer.eos_token_id
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=config.torch_dtype())
        self._mutex = threading.Lock()
        self._waiting: list[Waiting] = []
        self._thread = ThreadPoolExecutor(1, "hugging-face")
        self._numbers = {"requests_finished": 0.0, "output_tokens": 0.0}
        self.weight_version = 0
        length = self._model.config.max_position_embeddings
        self.limits = RequestLimits(self._model.config.vocab_size, length, 1, length, has_tokenizer=True)

    def preparation(self, params: SamplingParams) -> None:
        """Return None: it constrains nothing, so nothing is compiled."""

    def submit(self, prompt: list[int], params: SamplingParams, request_id: str) -> Waiting:
        self.limits.check_prompt(prompt)
        if params != _plain(params):
            raise RequestError(f"Hugging Face's generate is asked for temperature, top_k and top_p alone, not {params}")
        waiting = Waiting(prompt, params, request_id)
        with self._mutex:
            self._waiting.append(waiting)
        self._thread.submit(self._next_batch)
        return waiting

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop waiting requests; running ones go on to their end."""

    def receive_weights(self, source: object = None, **options: Any) -> SyncReport:
        """Update the weights after the running batch, whatever `in_flight` says."""
        asked = UpdateOptions.of(options)
        number = self.weight_version + 1 if asked.version is None else asked.version

        def write() -> SyncReport:
            return apply_weights(
                self._model, source, partial=asked.partial, cast=asked.cast, version=number, verify=asked.verify
            )

        report = self._thread.submit(write).result()
        self.weight_version = number
        return report

    def sleep(self, tags: object = None, level: int = 1) -> None:
        """Do nothing: between calls only the weights are held, and they stay."""

    def wake_up(self, tags: object = None) -> None:
        """Do nothing, as `sleep` released nothing."""

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no prefix cache."""

    def stats(self) -> dict[str, float]:
        return dict(self._numbers)

    def check_usable(self) -> None:
        """Do nothing: a batch that fails fails only its own requests."""

    def close(self) -> None:
        self._thread.shutdown()

    def _next_batch(self) -> None:
        if not self._waiting:
            return  # an earlier batch took it along
        self._gather()
        with self._mutex:
            batch = [one for one in self._waiting if one.params == self._waiting[0].params][: self._config.max_num_seqs]
            self._waiting = [one for one in self._waiting if one not in batch]
        try:
            outputs = self._generate(batch)
        except Exception as error:
            for one in batch:
                one.result.set_exception(error)
            return
        for one, output in zip(batch, outputs, strict=True):
            one.result.set_result(output)

    def _gather(self) -> None:
        arrived = 0
        while arrived < len(self._waiting) < self._config.max_num_seqs:
            arrived = len(self._waiting)
            time.sleep(GATHER_SECONDS)

    @torch.no_grad()
    def _generate(self, batch: list[Waiting]) -> list[RequestOutput]:
        params, width = batch[0].params, max(len(one.prompt) for one in batch)
        ids = torch.full((len(batch), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, width - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, width - len(one.prompt) :] = 1
        ends = [end for end in (*params.stop_ids, self._end) if end is not None]
        done: Any = self._model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=params.max_tokens,
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            eos_token_id=None if params.ignore_eos else ends,
            pad_token_id=self._pad,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = done.sequences[:, width:]
        scaled = torch.stack(done.logits, dim=1).float() / (params.temperature or 1.0)
        logprobs = scaled.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        return [self._output(one, tokens[row], logprobs[row], ends) for row, one in enumerate(batch)]

    def _output(self, one: Waiting, tokens: torch.Tensor, logprobs: torch.Tensor, ends: list[int]) -> RequestOutput:
        ended = [] if one.params.ignore_eos else [i for i, token in enumerate(tokens.tolist()) if token in ends]
        length = ended[0] + 1 if ended else len(tokens)
        self._numbers["requests_finished"] += 1
        self._numbers["output_tokens"] += length
        values = logprobs[:length].tolist()
        sample = SampleOutput(
            index=0,
            token_ids=tokens[:length].tolist(),
            logprobs=values,
            raw_logprobs=values,
            top_logprobs=None,
            weight_versions=[(0, length, self.weight_version)],
            kv_versions=[],
            context_versions=[],
            finish_reason="stop" if ended else "length",
            stop_reason=None,
            text=None,
            num_cached_tokens=0,
        )
        return RequestOutput(one.request_id, one.prompt, [sample], 0, None, None, [])


def _plain(params: SamplingParams) -> SamplingParams:
    """Return the part of the parameters that is passed on, and the seed, which `generate` does not take: servers that
    begin behind the first step give one.
    """
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        seed=params.seed,
    )


class HuggingFaceServer(SamebitServer):
    """Runs samebit's server with that worker inside."""

    def make_worker(self, folder: str, options: ServerOptions, tokenizer: PreTrainedTokenizerBase) -> Any:
        return HuggingFaceWorker(folder, options.worker, tokenizer)


class HuggingFaceReplica(SamebitReplica):
    server_class = HuggingFaceServer
