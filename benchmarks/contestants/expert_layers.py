"""Run layers of routed experts, bound by samebit and by Hugging Face with ``grouped_mm``, on the same rows."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebit.benchmarks.workloads import models
from samebit.kernels import bind

Pass = Callable[[], None]
"""Computes all layers once."""


class ExpertLayers:
    """Holds layers with router and experts, as they are in a model; their router's weights are as large as trained ones
    are, so that rows differ in what they choose."""

    def __init__(self, shape: dict[str, Any], dtype: torch.dtype) -> None:
        model = models.build_experts(shape, dtype, max_tokens=64)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.normal_(std=shape["hidden_size"] ** -0.5)
        self.shape = shape
        self.dtype = dtype
        self._theirs = [layer.mlp for layer in model.model.layers]
        self._ours = [layer.mlp for layer in bind(copy.deepcopy(model)).model.layers]

    @property
    def layers(self) -> int:
        """Return their count."""
        return len(self._ours)

    def rows(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randn(1, count, self.shape["hidden_size"], generator=generator).to(self.dtype)

    def samebit(self, count: int) -> Pass:
        return self._all(self._ours, self.rows(count))

    def grouped_mm(self, count: int) -> Pass:
        return self._all(self._theirs, self.rows(count))

    def samebit_among(self, count: int, few: int) -> Pass:
        """Compute ``few`` experts of each layer alone, as if rows had chosen among no others.

        With fewer layers than the largest model has, other experts take turns, so that no weights stay in a cache.
        """
        x, experts = self.rows(count)[0], self.shape["num_experts"]
        scores = torch.rand(count, few, generator=torch.Generator().manual_seed(count))
        chosen = scores.topk(self.shape["num_experts_per_tok"]).indices.sort().values.int()
        weights = torch.full(chosen.shape, 1 / chosen.shape[1])
        ids = [chosen * (experts // few) + first for first in range(experts // few)]

        def run() -> None:
            for layer in self._ours:
                ids.append(ids.pop(0))
                layer.experts(x, ids[0], weights)

        return run

    def _all(self, layers: list[Any], x: Tensor) -> Pass:
        def run() -> None:
            for layer in layers:
                layer(x)

        return run

    def seconds(self, run: Pass, passes: int) -> float:
        """Return the mean seconds that a layer takes."""
        with torch.no_grad():
            began = time.perf_counter()
            for _ in range(passes):
                run()
            return (time.perf_counter() - began) / (passes * self.layers)

    def check(self, count: int) -> None:
        """Raise unless both compute the same, within rounding."""
        x = self.rows(count)
        with torch.no_grad():
            for ours, theirs in zip(self._ours, self._theirs, strict=True):
                one, other = (layer(x).float() for layer in (ours, theirs))
                error = float((one - other).norm() / other.norm())
                if not error < (1e-4 if self.dtype is torch.float32 else 0.1):
                    raise RuntimeError(f"a layer of experts is off by {error:.2g} from Hugging Face's")
