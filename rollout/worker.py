"""`RolloutWorker`: from a model to a running worker. The RPCs are those of `WorkerCore`.

Invariant: building either succeeds as a whole or raises before a thread exists.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numba
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding import binding_of, is_bound
from samebit.rollout.cache import CacheManager
from samebit.rollout.config import RolloutConfig
from samebit.rollout.engine import Engine
from samebit.rollout.loading import load_model
from samebit.rollout.runner import ModelRunner
from samebit.rollout.stopping import Tokenizer
from samebit.rollout.weights import WorkerWeights
from samebit.rollout.worker_core import WorkerCore


class RolloutWorker(WorkerCore):
    """Generates from a model folder, or from the trainer's own module without a second copy of it.

    The log-probability it reports for each sampled token is bit for bit the one that
    `samebit.kernels.token_logprobs` computes on the same weights.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        config: RolloutConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = RolloutConfig() if config is None else config
        _check_threads(self.config.num_threads)
        loaded = load_model(model, self.config, tokenizer)
        _bind(loaded.module, self.config.exact)
        self.config = self.config.with_block_size(binding_of(loaded.module).ssm_chunk)
        runner = ModelRunner(loaded.module, self.config)
        left = runner.bytes_left(self.config)
        cache = CacheManager(
            num_blocks=self.config.pool_blocks(runner.bytes_per_block(), loaded.max_model_len, left),
            block_size=runner.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            prefix_caching=self.config.enable_prefix_caching,
            eviction_policy=self.config.eviction_policy,
            states=runner.state_cache(),
        )
        super().__init__(
            Engine(runner, cache, self.config.max_num_batched_tokens, run_ahead=self.config.runs_ahead),
            WorkerWeights(loaded.module, shared=loaded.shared),
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            tokenizer=loaded.tokenizer,
            queue_while_asleep=self.config.while_asleep == "wait",
            on_thread_start=_thread_setup(self.config.num_threads, runner.device),
        )


def _bind(module: nn.Module, exact: bool) -> None:
    """A module that the trainer has bound keeps the SSM chunk that is recorded on it."""
    recorded = binding_of(module).ssm_chunk if is_bound(module) else None
    if recorded is None:
        bind(module, exact=exact)
    else:
        bind(module, ssm_chunk=recorded, exact=exact)


def _thread_setup(num_threads: int | None, device: torch.device) -> Callable[[], None]:
    """Thread counts and the current CUDA device belong to the thread that sets them: the generation thread's own."""

    def set_up() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
            numba.set_num_threads(num_threads)

    return set_up


def _check_threads(num_threads: int | None) -> None:
    most: int = numba.config.NUMBA_NUM_THREADS
    if num_threads is not None and num_threads > most:
        raise ValueError(f"num_threads must be at most {most} (NUMBA_NUM_THREADS of this process), got {num_threads}")
