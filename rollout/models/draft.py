"""Load a draft model, and give it a runner and memory of its own.

Invariant: what can not guess for a model is refused before the model is given memory, by an error that names both.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.grids import ceil_div
from samebit.rollout.cache import build_cache
from samebit.rollout.config import RolloutConfig
from samebit.rollout.engine.draft_model import DraftModel
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.models.loading import load_model, naming
from samebit.rollout.runner.model_runner import ModelRunner

DEFAULT_DRAFT_CACHE_BYTES = 1 << 30


class LoadedDraft(NamedTuple):
    """Holds a draft model that is ready to guess. pool_bytes: of its keys and values."""

    model: DraftModel
    pool_bytes: int


def load_draft_model(config: RolloutConfig, guessed: nn.Module, max_model_len: int) -> LoadedDraft | None:
    """Load the draft model of a configuration, for a bound model whose sequences have so many tokens; None where the
    configuration names none.

    Raises:
        ModelLoadError: it can not be loaded, or can not guess for this model.
        ValueError: its memory does not hold a block.
    """
    if config.draft_model is None:
        return None
    own = _own_config(config, guessed)
    loaded = load_model(config.draft_model, own)
    with naming(config.draft_model):
        bind(loaded.module, exact=config.exact)
    _check(loaded.module, guessed, config.draft_model)
    runner = ModelRunner(loaded.module, own)
    max_len, bytes_per_block = min(max_model_len, loaded.max_model_len), runner.shape.bytes_per_block()
    cache = build_cache(
        num_blocks=_count_blocks(config, own, bytes_per_block, max_len),
        block_size=own.decided_block_size,
        max_num_seqs=own.max_num_seqs,
        max_model_len=max_len,
        prefix_caching=config.enable_prefix_caching,
    )
    model = DraftModel(
        runner, cache, max_rows=own.max_num_batched_tokens, num_tokens=config.num_speculative_tokens, max_len=max_len
    )
    runner.warm_up(cache.tables.rows)
    return LoadedDraft(model, cache.pool.num_blocks * bytes_per_block)


def _own_config(config: RolloutConfig, guessed: nn.Module) -> RolloutConfig:
    """Return what a draft model is loaded and run with: the dtype of the model that it guesses for, and as many
    sequences as there are in a step that is filled up with guesses."""
    return RolloutConfig(
        max_num_seqs=min(config.max_num_seqs, config.decided_step_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype=guessed.get_parameter("lm_head.weight").dtype,
        device=config.device,
        revision=config.draft_revision,
        enforce_eager=config.enforce_eager,
        dequantize=config.dequantize,
        exact=config.exact,
    ).with_block_size(None)


def _check(module: nn.Module, guessed: nn.Module, name: str | Path) -> None:
    draft, model = binding_of(module), binding_of(guessed)
    if draft.state_layout is not None:
        raise ModelLoadError(
            f"draft_model={str(name)!r} has recurrent layers, whose states can not be taken back behind a wrong guess; "
            "allowed is a model with attention alone"
        )
    if draft.vocab_size > model.vocab_size:
        raise ModelLoadError(
            f"draft_model={str(name)!r} has a vocabulary of {draft.vocab_size} tokens, and the model one of "
            f"{model.vocab_size}; allowed is one of as many or less: the same tokenizer's, or its beginning"
        )


def _count_blocks(config: RolloutConfig, own: RolloutConfig, bytes_per_block: int, max_len: int) -> int:
    """Return how many blocks a draft model has: for all of its sequences at their longest, if they have room."""
    given = config.draft_cache_gb
    room = DEFAULT_DRAFT_CACHE_BYTES if given is None else int(given * 2**30)
    if room < bytes_per_block:
        raise ValueError(
            f"draft_cache_gb={given} does not hold one block of {bytes_per_block} bytes of "
            f"draft_model={config.draft_model!r}; allowed is at least that, or None for a GiB"
        )
    return min(own.max_num_seqs * ceil_div(max_len, own.decided_block_size), room // bytes_per_block)
