"""From whatever weights can come from to an update that was checked and is ready to be written.

Invariant: entering the context writes nothing. It may wait for a sender, so it is entered without holding
what generation needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from samebit.weight_sync.apply import PreparedUpdate, prepare_update
from samebit.weight_sync.link import ReceiverLink
from samebit.weight_sync.manifest import Manifest, UpdateTerms
from samebit.weight_sync.receiver import StreamUpdate, receiving
from samebit.weight_sync.report import SyncReport
from samebit.weight_sync.source import open_source
from samebit.weight_sync.stream import WeightStream


@contextmanager
def open_update(
    source: object, module: nn.Module, manifest: Manifest, terms: UpdateTerms, *, version: int
) -> Iterator[PreparedUpdate]:
    """`source`: a dict of tensors, a module, a folder of safetensors, a `WeightStream`, or the receiving end of a
    link. `version` is that of the weights now. On the way out of the context a sender hears how it ended."""
    if isinstance(source, ReceiverLink):
        with receiving(source, module, manifest, terms, version=version) as update:
            yield update
    elif isinstance(source, WeightStream):
        yield StreamUpdate(source, manifest, terms)
    else:
        with open_source(source, module) as opened:
            yield prepare_update(manifest, opened, terms)


def apply_weights(
    module: nn.Module,
    source: object,
    *,
    partial: bool = False,
    cast: bool = False,
    version: int = 0,
    verify: bool = False,
) -> SyncReport:
    """Bring a module that nobody is using up to date, without a worker."""
    terms = UpdateTerms(partial=partial, cast=cast)
    with open_update(source, module, Manifest.of(module), terms, version=version) as update:
        return update.write(module, version=version, verify=verify)
