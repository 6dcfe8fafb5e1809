"""Describe and allocate what a model's steps read and write: pages, states of recurrent layers, routes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.experts.routes import RouteLayout, RoutePages
from samebit.kernels.layout.kv_pages import PageLayout
from samebit.kernels.layout.lora.adapters import KeptTerms
from samebit.kernels.layout.states.memory import StateLayout, StateMemory
from samebit.rollout.cache.checkpoints.pool import CheckpointPool
from samebit.rollout.config import RolloutConfig
from samebit.rollout.memory.pool_sizes import count_checkpoints, count_held_states


@dataclass(frozen=True, eq=False)
class Memory:
    """Holds what a step reads and writes beside its arrays.

    states: None without recurrent layers. kept_terms: of the trainer's adapters, until the weights change. routes: of
    what routers choose; None while no request asks.
    """

    pages: tuple[torch.Tensor, ...]
    states: StateMemory | None
    block_size: int
    num_blocks: int
    kept_terms: KeptTerms
    routes: RoutePages | None = None


@dataclass(frozen=True, eq=False)
class MemoryShape:
    """Holds the layouts of a bound model's memory, and how much of it a configuration asks for.

    Attributes:
        pages: of keys and values.
        states: of recurrent layers; None without.
        routes: of what routers choose; None without routed experts.
        dtype, device: of the model.
        block_size: tokens a block.
        held_slots: live states behind those of running sequences, for prompts whose samples begin later.
        num_checkpoints: cached states.
    """

    pages: PageLayout
    states: StateLayout | None
    routes: RouteLayout | None
    dtype: torch.dtype
    device: torch.device
    block_size: int
    held_slots: range
    num_checkpoints: int

    @staticmethod
    def of(model: nn.Module, config: RolloutConfig) -> MemoryShape:
        """Return the shape for a bound model.

        Raises:
            ValueError: the block size is not decided, states are asked for that the model does not have, or guesses
                that could not be taken back.
        """
        binding, head = binding_of(model), model.get_parameter("lm_head.weight")
        states = binding.state_layout and _with_guesses(binding.state_layout, config.num_speculative_tokens)
        bytes_each = 0 if states is None else states.bytes_per_checkpoint(head.dtype)
        held = range(config.max_num_seqs, config.max_num_seqs + count_held_states(config))
        return MemoryShape(
            binding.kv_layout, states, binding.route_layout, head.dtype, head.device, config.decided_block_size, held,
            count_checkpoints(config, bytes_each),
        )  # fmt: skip

    @property
    def num_slots(self) -> int:
        """Count the live states: a sequence's that runs, or a prompt's that is held."""
        return self.held_slots.stop

    def bytes_per_block(self) -> int:
        """Return the bytes of one KV block over all layers."""
        return self.pages.bytes_per_block(self.block_size, self.dtype)

    def bytes_per_slot(self) -> int:
        """Return the bytes of a running sequence's state over all recurrent layers; 0 without."""
        return 0 if self.states is None else self.states.bytes_per_slot(self.dtype)

    def bytes_per_checkpoint(self) -> int:
        """Return the bytes of a cached state over all recurrent layers; 0 without."""
        return 0 if self.states is None else self.states.bytes_per_checkpoint(self.dtype)

    def bytes_of_states(self) -> int:
        """Return the bytes of all live and cached states."""
        return self.num_slots * self.bytes_per_slot() + self.bytes_of_checkpoints()

    def bytes_of_checkpoints(self) -> int:
        """Return the bytes of all cached states."""
        return self.num_checkpoints * self.bytes_per_checkpoint()

    def bytes_of_live_states(self, num_blocks: int) -> int:
        """Return the bytes of the live states that can be written at once: each sequence that runs has a block."""
        return (min(self.held_slots.start, num_blocks) + len(self.held_slots)) * self.bytes_per_slot()

    def checkpoint_pool(self) -> CheckpointPool | None:
        """Return the bookkeeping of the checkpoints; None without recurrent layers."""
        if self.states is None:
            return None
        return CheckpointPool(self.num_checkpoints, self.block_size, self.held_slots)

    def allocate(self, num_blocks: int, kept_terms: KeptTerms, routes: RoutePages | None) -> Memory:
        """Allocate zeroed states, and zeroed pages for blocks 0 .. num_blocks, block 0 being the null block."""
        pages = self.pages.allocate(num_blocks, self.block_size, self.dtype, self.device)
        states = None
        if self.states is not None:
            states = self.states.allocate(self.num_slots, self.dtype, self.num_checkpoints, self.device)
        return Memory(pages, states, self.block_size, num_blocks, kept_terms, routes)

    def allocate_routes(self, num_blocks: int) -> RoutePages:
        """Allocate memory for what routers choose.

        Raises:
            ValueError: the model has no routed experts.
        """
        if self.routes is None:
            raise ValueError("this model has no routed experts that could be noted")
        return self.routes.allocate(num_blocks, self.block_size, self.device)


def _with_guesses(states: StateLayout, count: int) -> StateLayout:
    """Return the layout that lets so many tokens be taken back, or as many as can be."""
    if count and states.shape.changes_tail:
        raise ValueError(
            f"num_speculative_tokens={count}, but the model has layers of Kimi Delta Attention, where a token changes "
            "what is kept of those before it: that can not be taken back behind a wrong guess; allowed for it: 0"
        )
    return replace(states, guesses=min(count, states.most_guesses))
