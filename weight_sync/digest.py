"""Compute a tensor's digest in the pass that copies it, and see there whether it is finite and whether it changed.

The digest is a sum, modulo 2**64, over the tensor's 64-bit words, of each word mixed with its place (an odd
multiplier between two xor-shifts, as in the finaliser of MurmurHash3). It guards against accidents, not
against forgery.

Invariants
----------
* A digest depends on the bits in row-major order alone: not on strides, threads, or where a transfer cut the
  tensor into pieces, since the sum has no order. A cut lies on a multiple of 8 bytes; the last word is padded
  with zeros.
* Each word is mixed by a bijection: a change within one word always changes the digest.
* The pass reads each source word once. Copy, digest, finite and changed together cost what a copy costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import config, njit
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

WORD = 8
MODULUS = 1 << 64
PLACE = np.uint64(0x9E3779B97F4A7C15)
MIX = np.uint64(0xD6E8FEB86659FD93)
FOLD_A = np.uint64(29)
FOLD_B = np.uint64(32)
_ZERO = np.uint64(0)

_EXPONENT_STEP = {
    torch.float64: (8, 1 << 52),
    torch.float32: (4, 1 << 23),
    torch.float16: (2, 1 << 10),
    torch.bfloat16: (2, 1 << 7),
    torch.float8_e5m2: (1, 1 << 2),
    torch.float8_e4m3fn: (1, 1),
}
"""Holds, by dtype, the bytes of an element, and what added to an infinity or NaN (without its sign) carries into the
sign bit."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_EXPONENT_STEP, *_INTEGERS)}
"""Lists the dtypes that weights can have, by name."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop over the words of weights, and keep it on disk.

    Raises:
        OSError: it can be kept nowhere.
    """
    compiler = njit(cache=True, nogil=True, error_model="numpy")
    try:
        loop: Callable[..., Any] = compiler(function)
    except RuntimeError as error:
        raise OSError(
            f"no folder to keep the compiled code of {inspect.getfile(function)} in: neither the __pycache__ "
            f"beside it nor the user's cache folder can be written, NUMBA_CACHE_DIR={config.CACHE_DIR!r}; "
            "set NUMBA_CACHE_DIR to a folder that can be written"
        ) from error
    return loop


@dataclass(frozen=True)
class Scan:
    """Holds what one pass over a tensor or a piece of one found. `changed`: the copy changed a bit of its target."""

    digest: int
    finite: bool
    changed: bool = False


@dataclass(frozen=True)
class Lanes:
    """Holds the constants that find infinities and NaN in a word: `(word & magnitude) + step` has a bit of `sign`
    set."""

    magnitude: np.uint64
    step: np.uint64
    sign: int

    @staticmethod
    @cache
    def of(dtype: torch.dtype) -> Lanes:
        """Return the constants for a dtype. Raises `TypeError` for one that weights can not have."""
        if dtype in _INTEGERS:
            return Lanes(_ZERO, _ZERO, 0)
        if dtype not in _EXPONENT_STEP:
            allowed = ", ".join(DTYPES)
            raise TypeError(f"weights can not be {str(dtype).removeprefix('torch.')}; they can be {allowed}")
        size, step = _EXPONENT_STEP[dtype]
        ones = sum(1 << (8 * size * lane) for lane in range(WORD // size))
        sign = ones << (8 * size - 1)
        return Lanes(np.uint64(sign ^ (MODULUS - 1)), np.uint64(step * ones), sign)


def scan(tensor: Tensor) -> Scan:
    """Read a tensor once, for its digest and whether all of it is finite."""
    return scan_bytes(readable_bytes(tensor), Lanes.of(tensor.dtype))


def copy_scanned(source: Tensor, target: Tensor) -> Scan:
    """Copy `source` into `target` (equal shape and dtype) and scan it. Autograd sees a write in place."""
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(f"can not copy {list(source.shape)} {source.dtype} to {list(target.shape)} {target.dtype}")
    lanes = Lanes.of(target.dtype)
    if in_place_bytes(target) is not None:
        result = copy_bytes(readable_bytes(source), writable_bytes(target), lanes)
        if result.changed:
            torch.autograd.graph.increment_version(target)
        return result
    staging = target.detach().to("cpu").contiguous().clone()
    result = copy_bytes(readable_bytes(source), writable_bytes(staging), lanes)
    if result.changed:
        with torch.no_grad():
            target.copy_(staging)
    return result


def scan_bytes(source: Bytes, lanes: Lanes, *, offset: int = 0) -> Scan:
    """Scan a piece that begins `offset` bytes (a multiple of 8) into its tensor."""
    words, rest = _split(source)
    first = np.uint64(offset // WORD + 1)
    digest, bad = _scan_words(words, first, lanes.magnitude, lanes.step)
    if rest.size:
        last_digest, last_bad = _scan_words(_padded(rest), first + np.uint64(words.size), lanes.magnitude, lanes.step)
        digest, bad = (int(digest) + int(last_digest)) % MODULUS, int(bad) | int(last_bad)
    return Scan(int(digest), not int(bad) & lanes.sign)


def copy_bytes(source: Bytes, target: Bytes, lanes: Lanes, *, offset: int = 0) -> Scan:
    """Copy a piece that begins `offset` bytes (a multiple of 8) into its tensor, and scan it."""
    words, rest = _split(source)
    first = np.uint64(offset // WORD + 1)
    digest, bad, changed = _copy_words(words, _split(target)[0], first, lanes.magnitude, lanes.step)
    if not rest.size:
        return Scan(int(digest), not int(bad) & lanes.sign, bool(changed))
    last = scan_bytes(rest, lanes, offset=offset + words.size * WORD)
    rest_changed = not np.array_equal(target[words.size * WORD :], rest)
    target[words.size * WORD :] = rest
    finite = last.finite and not int(bad) & lanes.sign
    return Scan((int(digest) + last.digest) % MODULUS, finite, bool(changed) or rest_changed)


def add_digests(digests: Iterable[int]) -> int:
    """Return the digest of a tensor, given those of its pieces."""
    return sum(digests) % MODULUS


def chain_digests(digests: Iterable[int]) -> int:
    """Return one digest of several, which depends on their order."""
    values = np.fromiter(digests, np.uint64)
    return scan_bytes(values.view(np.uint8), Lanes.of(torch.int64)).digest


def digest_of(digests: Mapping[str, int]) -> int:
    """Return one digest of named tensors, which does not depend on the order they came in."""
    return chain_digests(digests[name] for name in sorted(digests))


def hexadecimal(digest: int) -> str:
    return f"{digest:016x}"


def readable_bytes(tensor: Tensor) -> Bytes:
    """Return the bits of a tensor in row-major order, on the host; copied only if they lie elsewhere or otherwise."""
    flat = _flat(tensor.detach().to("cpu").contiguous())
    return flat if flat.ctypes.data % WORD == 0 else flat.copy()


def writable_bytes(tensor: Tensor) -> Bytes:
    """Return the memory of a tensor. Raises `ValueError` where `in_place_bytes` gives None."""
    flat = in_place_bytes(tensor)
    if flat is None:
        raise ValueError("the tensor is not contiguous, aligned memory of the host")
    return flat


def in_place_bytes(tensor: Tensor) -> Bytes | None:
    """Return the memory of a tensor that is contiguous, on the host, and begins at a multiple of 8; None otherwise."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.data_ptr() % WORD:
        return None
    return _flat(tensor.detach())


def _flat(tensor: Tensor) -> Bytes:
    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def _split(array: Bytes) -> tuple[Any, Bytes]:
    """Return the whole words, and the up to 7 bytes after them."""
    whole = array.size - array.size % WORD
    return array[:whole].view(np.uint64), array[whole:]


def _padded(rest: Bytes) -> Any:
    word = np.zeros(WORD, np.uint8)
    word[: rest.size] = rest
    return word.view(np.uint64)


@compiled
def _scan_words(source: Any, first: Any, magnitude: Any, step: Any) -> Any:
    total = _ZERO
    bad = _ZERO
    for i in range(source.size):
        word = source[i]
        bad |= (word & magnitude) + step
        mixed = word ^ (PLACE * (first + np.uint64(i)))
        mixed ^= mixed >> FOLD_A
        mixed *= MIX
        total += mixed ^ (mixed >> FOLD_B)
    return total, bad


@compiled
def _copy_words(source: Any, target: Any, first: Any, magnitude: Any, step: Any) -> Any:
    total = _ZERO
    bad = _ZERO
    changed = _ZERO
    for i in range(source.size):
        word = source[i]
        changed |= word ^ target[i]
        target[i] = word
        bad |= (word & magnitude) + step
        mixed = word ^ (PLACE * (first + np.uint64(i)))
        mixed ^= mixed >> FOLD_A
        mixed *= MIX
        total += mixed ^ (mixed >> FOLD_B)
    return total, bad, changed
