"""Compare the routes of a model on this machine, and name the first module whose bits differ.

What it shows: that rows have the same bits in calls of other sizes, that steps on pages and states have those of a
trainer's call, and that CUDA graphs have those of kernels launched one by one; for the model's own shapes and weights,
on some two hundred tokens. What it does not: a proof. `samebit check` compares more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from samebit.kernels.layout import device
from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import SelfTestError
from samebit.rollout.runner.forward import forward_for
from samebit.rollout.self_test import remembered
from samebit.rollout.self_test.routes import Routes

logger = logging.getLogger(__name__)

Trace = dict[str, torch.Tensor]
"""Rows of a module's outputs, by its name, in the order in which modules were first called."""


def self_test(model: nn.Module, config: RolloutConfig, max_model_len: int) -> None:
    """Test a bound model, if the configuration asks for it and this has not passed before.

    Raises:
        SelfTestError: a bit differs; it names the route, and the first module that differs.
    """
    if not config.tests_itself:
        return
    routes = Routes.of(model, config.decided_block_size, max_model_len)
    key = remembered.key_of(model, _tried(routes, config))
    if remembered.has_passed(key):
        logger.info("self-test: passed before with this machine, these versions, this model and configuration")
        return
    began = time.perf_counter()
    tokens = _compare(routes, config)
    remembered.remember(key)
    logger.info(
        "self-test: %d tokens have the same bits in a trainer's call, alone and in steps (%.1f s)",
        tokens, time.perf_counter() - began,
    )  # fmt: skip


def _tried(routes: Routes, config: RolloutConfig) -> dict[str, object]:
    """Return what the comparison takes from the configuration."""
    return {
        "lengths": [len(sequence) for sequence in routes.sequences],
        "block_size": routes.block_size,
        "room of graphs": config.max_num_seqs if _has_graphs(routes.model, config) else 0,
    }


def _has_graphs(model: nn.Module, config: RolloutConfig) -> bool:
    return device.on_gpu(model.get_parameter("lm_head.weight")) and not config.enforce_eager


def _compare(routes: Routes, config: RolloutConfig) -> int:
    """Compare the routes; return how many tokens were."""
    model = routes.model
    head = model.get_parameter("lm_head.weight")
    tokens = sum(map(len, routes.sequences))
    room = replace(config, max_num_batched_tokens=max(tokens, config.max_num_seqs), max_num_seqs=config.max_num_seqs)
    eager = forward_for(head, replace(room, enforce_eager=True))
    expected = routes.as_trainer()
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "each sequence in a call of its own": routes.alone,
        "prompts in pieces, then decodes": lambda: routes.in_steps(eager),
    }
    for way, compute in ways.items():
        found = compute()
        if not _same_bits(found, expected):
            where = _first_difference(model, routes.as_trainer, compute)
            raise _error(way, where, found, expected)
    if _has_graphs(model, config):
        graphed = routes.in_steps(forward_for(head, room))
        if not _same_bits(graphed, expected):
            raise _error("prompts in pieces, then decodes", "the replay of its CUDA graphs", graphed, expected)
    return tokens


def _error(way: str, where: str, found: torch.Tensor, expected: torch.Tensor) -> SelfTestError:
    rows = int((found.view(torch.int32) != expected.view(torch.int32)).any(1).sum())
    return SelfTestError(
        f"self-test: {rows} of {len(found)} rows of logits have other bits ({way}) than in a trainer's call, by up to "
        f"{float((found - expected).abs().max()):.3g}; the first to differ is {where}. Log-probabilities would not be "
        "exact on this machine: please report it with the output of `samebit check`; RolloutConfig(self_test=False) "
        "starts without this test"
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all bits are equal, NaN's too."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _first_difference(model: nn.Module, expected: Callable[[], torch.Tensor], found: Callable[[], torch.Tensor]) -> str:
    """Compute both once more; return the first module, in the order of the calls, whose rows are others."""
    traces: list[Trace] = []
    for compute in (expected, found):
        with _traced(model) as trace:
            compute()
        traces.append({name: torch.cat(rows) for name, rows in trace.items()})
    wanted, given = traces
    modules = dict(model.named_modules())
    for name, rows in wanted.items():
        other = given.get(name)
        if other is None or rows.shape != other.shape:
            continue
        if not torch.equal(_sorted(rows), _sorted(other)):
            return f"{name} ({type(modules[name]).__name__})"
    return "none of the modules by itself: several that share a launch, or the epilogue of the head"


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows in an order of their own: routes compute them in different ones."""
    return torch.stack(sorted(rows.float().cpu(), key=torch.Tensor.tolist))


@contextmanager
def _traced(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Keep what modules without children give, as rows."""
    trace: dict[str, list[torch.Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor):
                trace.setdefault(name, []).append(out.detach().reshape(-1, out.shape[-1]))

        return hook

    modules = [(name, module) for name, module in model.named_modules() if not dict(module.named_children())]
    handles = [module.register_forward_hook(note(name)) for name, module in modules]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
