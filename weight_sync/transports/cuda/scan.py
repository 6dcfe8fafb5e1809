"""Scan bytes that lie on a GPU, as `digest` does on the host, with torch's operations.

Invariants
----------
* The digest, and what counts as finite, are those of `scan_bytes`, to the bit.
* A scan needs a few times `_CHUNK` of extra memory, whatever the number of bytes. It waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebit.weight_sync.digest import FOLD_A, FOLD_B, MIX, MODULUS, PLACE, WORD, Lanes, Scan

_CHUNK = 1 << 19
"""The words that are scanned at a time."""


def device_bytes(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor in row-major order, as uint8 on its device; a copy only where they lie otherwise."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat if flat.storage_offset() % WORD == 0 else flat.clone()


def scan_device_bytes(source: Tensor, lanes: Lanes, *, offset: int = 0) -> Scan:
    """Scan a piece (uint8, contiguous) that begins `offset` bytes (a multiple of 8) into its tensor."""
    whole = source.numel() // WORD * WORD
    words, rest = source[:whole].view(torch.int64), source[whole:]
    first = offset // WORD + 1
    found = [_scan(words[begin : begin + _CHUNK], first + begin, lanes) for begin in range(0, words.numel(), _CHUNK)]
    if rest.numel():
        last = torch.zeros(WORD, dtype=torch.uint8, device=source.device)
        last[: rest.numel()] = rest
        found.append(_scan(last.view(torch.int64), first + words.numel(), lanes))
    if not found:
        return Scan(0, True)
    digests, bad = torch.stack(found).sum(0).tolist()
    return Scan(digests % MODULUS, bad == 0)


def _scan(words: Tensor, first: int, lanes: Lanes) -> Tensor:
    """Return the digest and the number of words with an infinity or NaN: int64 [2]. All arithmetic wraps around."""
    carried = (words & _signed(int(lanes.magnitude))) + _signed(int(lanes.step))
    bad = torch.count_nonzero(carried & _signed(lanes.sign))
    places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=words.device)
    mixed = words ^ (places * _signed(int(PLACE)))
    mixed = (mixed ^ _shifted(mixed, int(FOLD_A))) * _signed(int(MIX))
    return torch.stack([(mixed ^ _shifted(mixed, int(FOLD_B))).sum(), bad])


def _shifted(words: Tensor, places: int) -> Tensor:
    """Shift to the right and fill with zeros, where torch's own shift of int64 fills with the sign."""
    return (words >> places) & ((1 << (64 - places)) - 1)


def _signed(word: int) -> int:
    return word - MODULUS if word >= MODULUS >> 1 else word
