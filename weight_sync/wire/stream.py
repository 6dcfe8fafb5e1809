"""Offer weights that come once: names, shapes and dtypes first, then each tensor in turn.

Invariants
----------
* `specs` is known before the first tensor exists; `tensors()` may be called once, and yields exactly the
  announced tensors, in any order, or raises.
* A sharded tensor is gathered when its turn comes, by all ranks that hold a shard: part by part where it is split by
  rows, else whole. So every one of these ranks has to go through `tensors()`, `weights()` or `exhaust()`; one that
  fails on the way calls `exhaust()`, which begins in the middle of the tensor whose turn it is.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samebit.weight_sync.digest import Lanes
from samebit.weight_sync.folder_names import FolderNames
from samebit.weight_sync.manifest import TensorSpec, check_name, dtype_name, float32_names, identity, live_tensors
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.source import check_readable, checked_dict
from samebit.weight_sync.wire.sharded import Sharded, in_parts

logger = logging.getLogger(__name__)


class WeightStream:
    """Iterates over (name, tensor), as announced by `specs`. `ties`: the first name of each tensor that comes again.
    `of_images`: the tensors that no text goes through: over a link they go to a receiver that computes images."""

    def __init__(self, specs: Mapping[str, TensorSpec], weights: Iterable[tuple[str, Tensor | Sharded]]) -> None:
        for name, spec in specs.items():
            if not isinstance(name, str) or not isinstance(spec, TensorSpec) or spec.name != name:
                raise TypeError(f"specs maps a name to the TensorSpec of that name, got {name!r}: {spec!r}")
            check_name(name)
            Lanes.of(spec.dtype)
        self.specs = dict(specs)
        self.casts: tuple[str, ...] = ()
        self.ties: dict[str, str] = {}
        self.of_images: tuple[str, ...] = ()
        self._weights = iter(weights)
        self._gathering: Sharded | None = None
        self._begun = False

    @classmethod
    def of(
        cls, weights: nn.Module | Mapping[str, Tensor], *, dtype: torch.dtype | None = None, images: bool = True
    ) -> WeightStream:
        """Stream a module (tied weights once) or a dict, in which a tensor may have several names; floating tensors
        are cast to `dtype`, one at a time.

        The buffers of a module are never cast: no mixed precision casts them for a forward. Nor is what its class keeps
        in float32 beside parameters of `dtype`: as float32 it is computed with there. What a module holds and has no
        use for is left out: vision, where it is bound and computes text alone. With `images` False, so is what only
        images go through, which is then not gathered either.
        """
        tensors = checked_dict(weights) if isinstance(weights, Mapping) else _untied(_in_use(weights, images))
        check_readable(tensors)
        kept = set() if isinstance(weights, Mapping) else _uncast(weights, dtype)
        own = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
        specs = {name: spec if name in kept else _cast_spec(spec, dtype) for name, spec in own.items()}
        stream = cls(specs, ((name, _as_it_travels(tensor, specs[name].dtype)) for name, tensor in tensors.items()))
        stream.casts = tuple(
            f"{name}: {dtype_name(own[name].dtype)} -> {dtype_name(spec.dtype)}"
            for name, spec in specs.items()
            if spec.dtype != own[name].dtype
        )
        stream.ties = _ties(tensors)
        if isinstance(weights, nn.Module):
            stream.of_images = _of_images(weights, stream)
        return stream

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, or those of `names`, whole. Raises `SyncBrokenError` for one that is not as announced."""
        for name, weight in self.weights(names):
            yield name, weight.whole() if isinstance(weight, Sharded) else weight

    def weights(self, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor | Sharded]]:
        """Yield each tensor, or those of `names`; a `Sharded` one has to be gathered, part by part, before the next."""
        if self._begun:
            raise RuntimeError("this stream was read already: make another for the next update")
        self._begun = True
        missing = dict(self.specs)
        for name, given in self._weights:
            weight = _gathered(given)
            self._gathering = weight if isinstance(weight, Sharded) else None
            spec = missing.pop(name, None)
            if spec is None:
                raise SyncBrokenError(f"the stream gave {name!r}, which was not announced or came before")
            came = TensorSpec(name, tuple(weight.shape), weight.dtype)
            if came != spec:
                raise SyncBrokenError(f"the stream gave {came} for {name}, not {spec}")
            if names is None or name in names:
                yield name, weight
            elif isinstance(weight, Sharded):
                weight.exhaust()
        if missing:
            raise SyncBrokenError(f"the stream ended without {', '.join(missing)}")

    def exhaust(self) -> None:
        """Gather what is left and drop it, as a rank does that holds shards and sends nothing."""
        self._begun = True
        if self._gathering is not None:
            self._gathering.exhaust()
        for _, given in self._weights:
            weight = _gathered(given)
            if isinstance(weight, Sharded):
                weight.exhaust()


@contextmanager
def gone_through(source: object) -> Iterator[None]:
    """Run an update from this source; where it ends by an exception and the source is a `WeightStream`, exhaust it."""
    try:
        yield
    except BaseException:
        if isinstance(source, WeightStream):
            exhaust_after_error(source)
        raise


def exhaust_after_error(stream: WeightStream) -> None:
    """Exhaust a stream after an error, so that other ranks, which gather the same tensors, do not wait.

    Boundary: the iterator is the caller's own code. What it raises here is only logged, since the caller gets the error
    that ended the sync, which often came from the iterator itself.
    """
    try:
        stream.exhaust()
    except Exception:
        logger.warning("the rest of the weights could not be gathered either", exc_info=True)


def _in_use(module: nn.Module, images: bool) -> dict[str, Tensor]:
    names = FolderNames.offered_by(module)
    used = {name: tensor for name, tensor in live_tensors(module).items() if not names.ignores(name)}
    return {name: tensor for name, tensor in used.items() if images or not names.computes_images_with(name)}


def _of_images(module: nn.Module, stream: WeightStream) -> tuple[str, ...]:
    names, tied = FolderNames.offered_by(module), {*stream.ties, *stream.ties.values()}
    return tuple(name for name in stream.specs if names.computes_images_with(name) and name not in tied)


def _uncast(module: nn.Module, dtype: torch.dtype | None) -> set[str]:
    """Return the names of tensors that are sent as they are, whatever dtype is asked for."""
    buffers = {name for name, _ in module.named_buffers()}
    as_loaded = any(parameter.dtype is dtype for parameter in module.parameters())  # FSDP2, which casts, has one dtype
    return buffers | float32_names(module) if as_loaded else buffers


def _as_it_travels(tensor: Tensor, dtype: torch.dtype) -> Tensor | Sharded:
    """Return a tensor as it is sent. A sharded one takes a collective, now or when it is gathered."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        if in_parts(tensor):
            return Sharded(tensor, dtype)
        tensor = tensor.full_tensor()
    return tensor.to(dtype)


def _gathered(given: Tensor | Sharded) -> Tensor | Sharded:
    """Return what an iterator gave as `_as_it_travels` does, if it is sharded still."""
    return _as_it_travels(given, given.dtype) if isinstance(given, DTensor) else given


def _cast_spec(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    if dtype is None or not spec.dtype.is_floating_point:
        return spec
    return replace(spec, dtype=dtype)


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each tensor that comes under another one too, by the later name.

    A state dict has an object of its own for each name of a tied weight: their memory tells that they are one.
    """
    first: dict[object, str] = {}
    names = {name: first.setdefault(_memory(tensor), name) for name, tensor in tensors.items()}
    return {name: earlier for name, earlier in names.items() if earlier != name}


def _memory(tensor: Tensor) -> object:
    """Return a key that is equal for two names of one tensor, whole or sharded."""
    if not isinstance(tensor, DTensor):
        return identity(tensor), tensor.dtype
    local = tensor.to_local().detach()
    if local.data_ptr() == 0:  # without rows on this rank
        return id(tensor)
    return identity(local), tensor.dtype, tensor.shape, tensor.placements


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the first name of each."""
    first = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
