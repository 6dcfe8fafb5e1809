"""Draw random numbers with Philox4x32-10, the counter-based generator of Salmon et al. 2011 (also the one behind
``tl.rand``).

A draw is a pure function of (key, counter): the same for a token whatever the batch around it.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint32(0x9E3779B9)
_W1 = np.uint32(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_5 = np.uint32(5)
_6 = np.uint32(6)


@inlined_part
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    for _ in range(10):
        p0 = _M0 * np.uint64(c0)
        p1 = _M1 * np.uint64(c2)
        c0, c1, c2, c3 = (
            np.uint32(p1 >> _32) ^ c1 ^ k0,
            np.uint32(p1 & _LOW),
            np.uint32(p0 >> _32) ^ c3 ^ k1,
            np.uint32(p0 & _LOW),
        )
        k0 = np.uint32(k0 + _W0)
        k1 = np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@inlined_part
def number(counters: Any, keys: Any, row: int) -> Any:
    """Return the number in [0, 1) of a row."""
    a, b, _, _ = _words(counters, keys, row)
    return _number_of(a, b)


@inlined_part
def _words(counters: Any, keys: Any, row: int) -> Any:
    return _philox(counters[row, 0], counters[row, 1], counters[row, 2], counters[row, 3], keys[row, 0], keys[row, 1])


@inlined_part
def _number_of(a: Any, b: Any) -> Any:
    """Return the number in [0, 1) that 53 bits of the first two words of a row make."""
    high, low = np.float64(a >> _5), np.float64(b >> _6)
    return (high * 67108864.0 + low) / 9007199254740992.0


def _blocks(threads: int, counters: Any, keys: Any, out: Any, numbers: Any) -> None:
    """Write the four words of each row, and its number."""
    share_out(_blocks_row, counters.shape[0], threads, (counters, keys, out, numbers))


@kernel_part
def _blocks_row(row: int, counters: Any, keys: Any, out: Any, numbers: Any) -> None:
    a, b, c, d = _words(counters, keys, row)
    out[row, 0] = a
    out[row, 1] = b
    out[row, 2] = c
    out[row, 3] = d
    numbers[row] = _number_of(a, b)


blocks = SharedKernel(_blocks)
