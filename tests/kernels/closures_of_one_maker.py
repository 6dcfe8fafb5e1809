"""Make two kernels of two closures of one name, each too large to stand in place of its calls.

``python closures_of_one_maker.py first second`` runs the kernels of those names and writes what each wrote.
"""

import sys
from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.part import kernel_part


def _maker(factor: float) -> Any:
    @kernel_part
    def body(values: Any, out: Any) -> None:
        for i in range(len(values)):
            x = values[i]
            for _ in range(5):
                y = x * x + factor
                x = np.sqrt(np.abs(np.sin(y) - np.cos(x) * np.exp(-y)))
                x = x + np.log1p(x) * np.tanh(y) + np.arctan(x)
            out[i] = factor + 1e-300 * x

    return body


_one, _two = _maker(1.0), _maker(2.0)


def _first(values: Any, out: Any) -> None:
    _one(values, out)
    _one(values[1:], out)


def _second(values: Any, out: Any) -> None:
    _two(values, out)
    _two(values[1:], out)


KERNELS = {"first": compile_kernel(_first), "second": compile_kernel(_second)}


def run(name: str) -> list[float]:
    """Return what a kernel writes: its factor, thrice."""
    out = np.zeros(3)
    KERNELS[name](np.ones(3), out)
    return [float(value) for value in out]


if __name__ == "__main__":
    sys.stdout.write(str([run(name) for name in sys.argv[1:]]))
