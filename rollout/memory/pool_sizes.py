"""Count the blocks, checkpoints and held states that the memory of a configuration buys."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

from samebit.rollout.config import RolloutConfig
from samebit.weight_sync.transports.container import ROOT, memory_limit

DEFAULT_KV_CACHE_BYTES = 1 << 30
DEFAULT_STATE_CACHE_BYTES = 1 << 28

logger = logging.getLogger(__name__)


def count_held_states(config: RolloutConfig) -> int:
    """Return how many prompts keep their live state for samples that begin later."""
    return max(1, config.max_num_seqs // 4) if config.enable_prefix_caching else 0


def count_checkpoints(config: RolloutConfig, bytes_per_checkpoint: int) -> int:
    """Return how many states of recurrent layers are cached, when one takes this many bytes over all layers.

    bytes_per_checkpoint: 0 for a model without such layers.
    """
    if bytes_per_checkpoint == 0:
        if config.state_cache_gb is not None:
            raise ValueError(f"state_cache_gb={config.state_cache_gb}, but this model has no recurrent layers")
        return 0
    if not config.enable_prefix_caching:
        return 0
    if config.state_cache_gb is None:
        return max(1, DEFAULT_STATE_CACHE_BYTES // bytes_per_checkpoint)
    if config.state_cache_gb == 0:
        logger.warning("state_cache_gb=0: no state is cached, so a prefix that is hit saves memory, not computing")
        return 0
    count = int(config.state_cache_gb * 2**30) // bytes_per_checkpoint
    if count < 1:
        raise ValueError(
            f"state_cache_gb={config.state_cache_gb} does not hold one state of {bytes_per_checkpoint} bytes; "
            f"at least {_gib(bytes_per_checkpoint)} are needed, or 0 for no cached states"
        )
    return count


def count_blocks(config: RolloutConfig, bytes_per_block: int, max_model_len: int, bytes_left: int = 0) -> int:
    """Return the number of blocks in the KV pool of a model whose block takes `bytes_per_block` over all layers.

    bytes_left: for pages, of the share that is `gpu_memory_utilization`.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    takes_memory = bytes_per_block > 0  # blocks of a model without attention take none
    if config.kv_cache_gb is not None and takes_memory:
        blocks = int(config.kv_cache_gb * 2**30) // bytes_per_block
        if blocks < 1:
            raise ValueError(
                f"kv_cache_gb={config.kv_cache_gb} does not hold one block of {bytes_per_block} bytes "
                f"(block_size={config.block_size}); at least {_gib(bytes_per_block)} are needed"
            )
        return blocks
    per_sequence = math.ceil(max_model_len / config.decided_block_size)
    if config.gpu_share is not None and takes_memory:
        blocks = bytes_left // bytes_per_block
        if blocks < per_sequence:
            raise ValueError(
                f"gpu_memory_utilization={config.gpu_share} leaves {_gib(bytes_left)} GiB for pages; "
                f"one sequence of max_model_len={max_model_len} needs {_gib(per_sequence * bytes_per_block)}"
            )
        return blocks
    affordable = max(DEFAULT_KV_CACHE_BYTES // max(1, bytes_per_block), per_sequence)
    return min(config.max_num_seqs * per_sequence, affordable)


def check_room(
    config: RolloutConfig,
    num_blocks: int,
    bytes_per_block: int,
    live_states: int,
    cached_states: int,
    root: Path = ROOT,
    *,
    draft_pool: int = 0,
) -> None:
    """Raise ValueError where so many blocks, the states of recurrent layers, and the blocks of a draft model can not be
    in the memory of this machine, or of a container.

    live_states, cached_states, draft_pool: the bytes of all that may be there at once. root: of the file system.
    """
    blocks, machine = num_blocks * bytes_per_block, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = memory_limit(root)
    most = machine if container is None else min(machine, container)
    if config.device != "cpu" or blocks + live_states + cached_states + draft_pool <= most:
        return
    owner = "machine has" if most == machine else "process's container may have"
    parts = [
        _Part(
            f"{num_blocks} KV blocks",
            blocks,
            {
                "num_blocks": config.num_blocks,
                "kv_cache_gb": config.kv_cache_gb,
                "max_model_len": config.max_model_len,
            },
        ),
        _Part("live states of recurrent layers", live_states, {"max_num_seqs": config.max_num_seqs}),
        _Part("cached states", cached_states, {"state_cache_gb": config.state_cache_gb}),
        _Part("the draft model's KV blocks", draft_pool, {"draft_cache_gb": config.draft_cache_gb}),
    ]
    raise ValueError(_no_room([part for part in parts if part.size], f"this {owner} {_gib(most)}"))


@dataclass(frozen=True)
class _Part:
    """Says how many bytes a part of the memory takes, and the fields of the config that make it smaller."""

    what: str
    size: int
    given: dict[str, object]


def _no_room(parts: list[_Part], limit: str) -> str:
    """Say what the parts need, what there is, and which fields make room."""
    whats, sizes = " + ".join(part.what for part in parts), [part.size for part in parts]
    sums = " + ".join(map(_gib, sizes)) + (f" = {_gib(sum(sizes))}" if len(sizes) > 1 else "")
    given = {field: value for part in parts for field, value in part.given.items()}
    values, (*fields, last) = ", ".join(f"{field}={value}" for field, value in given.items()), given
    smaller = f"{', '.join(fields)} or {last}" if fields else last
    return f"{whats} need {sums} GiB, and {limit} ({values}): give a smaller {smaller}"


def _gib(count: int) -> str:
    """Return the GiB that hold this many bytes, to six digits, rounded up."""
    millionths = -(-count * 10**6 // 2**30)
    return f"{millionths // 10**6}.{millionths % 10**6:06d}"
