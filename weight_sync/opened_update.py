"""Turn any source of weights into an update that was checked and is ready to be written.

Invariant: entering the context writes nothing. It may wait for a sender, so it is entered without holding
what generation needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from samebit.weight_sync.apply import PreparedUpdate, prepare_update
from samebit.weight_sync.manifest import Manifest, UpdateTerms, castable
from samebit.weight_sync.quantized import open_quantized, quantization_of
from samebit.weight_sync.report import SyncReport
from samebit.weight_sync.source import TensorSource, open_source
from samebit.weight_sync.wire.link import ReceiverLink
from samebit.weight_sync.wire.receiver import StreamUpdate, receiving
from samebit.weight_sync.wire.stream import WeightStream, gone_through


@contextmanager
def open_update(
    source: object, module: nn.Module, manifest: Manifest, terms: UpdateTerms, *, version: int | None
) -> Iterator[PreparedUpdate]:
    """Check an update from a source, ready to be written; on the way out, tell a sender how it ended.

    Args:
        source: A dict of tensors, a module, a folder of safetensors, a `WeightStream`, or the receiving end of a link.
        version: The version of the weights now; None where they are incomplete.
    """
    if isinstance(source, ReceiverLink):
        with receiving(source, module, manifest, terms, version=version) as update:
            yield update
    elif isinstance(source, WeightStream):
        yield StreamUpdate(source, manifest, terms)
    else:
        with _opened(source, manifest, terms) as opened:
            in_files = isinstance(source, str | Path)
            yield prepare_update(manifest, opened, replace(terms, widen_buffers=in_files))


def _opened(source: object, manifest: Manifest, terms: UpdateTerms) -> TensorSource:
    opened = open_source(source)
    if not isinstance(source, str | Path):
        return opened
    folder = Path(source)
    settings = quantization_of(folder)
    if settings is None:
        return opened
    taken_as = partial(_taken_as, manifest, terms)
    return open_quantized(folder, opened, settings, taken_as, dequantize=terms.dequantize)


def _taken_as(manifest: Manifest, terms: UpdateTerms, name: str) -> torch.dtype:
    """Return the dtype for a tensor that is stored quantized: with `cast` the model's, so that it is rounded once, and
    for one that its class keeps in float32."""
    place = manifest.place(name)
    as_own = place is not None and (terms.cast or place.name in manifest.float32)
    own = manifest.specs[place.name].dtype if place is not None and as_own else torch.bfloat16
    return own if castable(torch.bfloat16, own) else torch.bfloat16


def apply_weights(
    module: nn.Module,
    source: object,
    *,
    partial: bool = False,
    cast: bool = False,
    dequantize: bool = False,
    version: int = 0,
    verify: bool = False,
) -> SyncReport:
    """Update a module that is not in use, without a worker."""
    terms = UpdateTerms(partial=partial, cast=cast, dequantize=dequantize)
    with gone_through(source), open_update(source, module, Manifest.of(module), terms, version=version) as update:
        return update.write(module, version=version, verify=verify)
