"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter on the CPU.

The interpreter shows accuracy, masks and poison. It shows nothing about the bits of a
GPU. Equal bits in it mean equal tiles and an equal order of sums: in these tests its matrix
product adds in the order of the depth, as a GPU's does. (NumPy's, which it would take, gives a
row other bits in another place of the tile on many processors.)

It is spared work of which nothing is seen (a quarter of its time). At each call of a function by a kernel it looks
through all of `triton.language` for what it replaces there; here once a launch for each file that the functions stand
in. It computes whether integers overflow, and drops the answer. It makes its table of dtypes at each use, and the
objects that describe a shape for each tensor and each type; here once a shape.
"""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, InterpreterOptions, TensorHandle

if not torch.cuda.is_available() and not knobs.runtime.interpret:
    pytest.skip("no GPU, and Triton was imported before its interpreter was asked for", allow_module_level=True)


@numba.njit("void(float32[:, :], float32[:, :], float32[:, ::1])", cache=True)
def _add_product(a: Any, b: Any, acc: Any) -> None:
    """One chain over the depth for each element: vectors run along a row, so they change no order."""
    for row in range(acc.shape[0]):
        for depth in range(a.shape[1]):
            for output in range(acc.shape[1]):
                acc[row, output] += a[row, depth] * b[depth, output]


def _dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *precision: Any) -> Any:
    product = np.array(acc.data, np.float32, order="C")
    _add_product(a.data, b.data, product)
    return TensorHandle(product, acc.dtype.scalar)


@pytest.fixture(scope="session", autouse=True)
def _sums_in_order() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        yield


@pytest.fixture(scope="session", autouse=True)
def _spared_work() -> Iterator[None]:
    replace, launch = interpreter._patch_lang, GridExecutor.__call__
    replaced: set[int] = set()
    array_dtype = cache(interpreter._get_np_dtype)

    def replace_once(function: Any) -> Any:
        place = id(function.__globals__)
        if place in replaced:
            return interpreter._LangPatchScope()
        replaced.add(place)
        return replace(function)

    def launched(self: GridExecutor, *arguments: Any, **named: Any) -> None:
        replaced.clear()
        launch(self, *arguments, **named)

    def array_dtype_of(kind: Any) -> np.dtype[Any]:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else array_dtype(kind.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(GridExecutor, "__call__", launched)
        patch.setattr(interpreter, "_get_np_dtype", array_dtype_of)
        patch.setattr(interpreter.interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False))
        if knobs.runtime.interpret:
            _describe_shapes_once(patch)
        yield


def _describe_shapes_once(patch: pytest.MonkeyPatch) -> None:
    """Make tensors and block types of one shape share what describes it, as Triton itself makes it for the first."""
    new_tensor, new_block = core.tensor.__init__, core.block_type.__init__

    @cache
    def first_block(sizes: tuple[int, ...]) -> tuple[core.tuple, int, str]:
        made = core.block_type.__new__(core.block_type)
        new_block(made, core.int1, list(sizes))
        return made.shape, made.numel, str(made.shape)

    @cache
    def first_tensor(sizes: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
        made = core.tensor.__new__(core.tensor)
        new_tensor(made, None, core.block_type(core.int1, list(sizes)) if sizes else core.int1)
        return made.shape, made.numel

    def block(self: core.block_type, element: core.dtype, shape: Any) -> None:
        assert isinstance(shape, list | core.tuple)
        self.element_ty = element
        self.shape, self.numel, said = first_block(tuple(map(core._unwrap_if_constexpr, shape)))
        self.name = f"<{said}, {element}>"

    def tensor(self: core.tensor, handle: Any, kind: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = first_tensor(tuple(kind.shape) if kind.is_block() else ())

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """In this mode torch fills what `torch.empty` returns with NaN. (On CUDA it complains about some operations.)"""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        warnings.filterwarnings("ignore", message="overflow encountered")  # of activations far from 0
        yield
    torch.use_deterministic_algorithms(False)
