"""Spare Triton's interpreter work of which nothing is seen: half of its time.

At each call of a function by a kernel it looks through all of `triton.language` for what it replaces there; here once a
launch for each file that the functions stand in. It computes whether integers overflow, and drops the answer. It makes
its table of dtypes at each use, and the objects that describe a shape for each tensor and each type; here once a shape.
It compares shapes, types and what a constant holds step by step; here two that are one object are equal at once. It
makes both operands as large as the result, which NumPy does as it computes. And it takes floats apart to convert them;
here torch does.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterOptions


def replace_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    replace, launch = interpreter._patch_lang, GridExecutor.__call__
    replaced: set[int] = set()

    def replace_once(function: Any) -> Any:
        place = id(function.__globals__)
        if place in replaced:
            return interpreter._LangPatchScope()
        replaced.add(place)
        return replace(function)

    def launched(self: GridExecutor, *arguments: Any, **named: Any) -> None:
        replaced.clear()
        launch(self, *arguments, **named)

    patch.setattr(interpreter, "_patch_lang", replace_once)
    patch.setattr(GridExecutor, "__call__", launched)


def call_at_once(patch: pytest.MonkeyPatch) -> None:
    """Hand a kernel's call on as it is. (Triton copies its named arguments each time, and asks if it is a kernel's.)"""

    def replace(holder: object, name: str, member: Any, _: object, scope: interpreter._LangPatchScope) -> None:
        function = vars(member).get("__wrapped__", member)

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        scope.set_attr(holder, name, called)

    patch.setattr(interpreter, "_patch_attr", replace)


def look_at_no_overflow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interpreter.interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False))


def know_dtypes(patch: pytest.MonkeyPatch) -> None:
    array_dtype = cache(interpreter._get_np_dtype)

    def array_dtype_of(kind: Any) -> np.dtype[Any]:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else array_dtype(kind.scalar)

    patch.setattr(interpreter, "_get_np_dtype", array_dtype_of)


def round_at_once(patch: pytest.MonkeyPatch) -> None:
    """Convert floats as torch does. (Triton takes their bits apart, and rounds up where two are equally near.)"""
    convert = interpreter._convert_float
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    words = {2: np.uint16, 4: np.uint32}

    def converted(given: npt.NDArray[Any], kind: Any, other: Any, rounding: Any) -> npt.NDArray[Any]:
        if (
            kind.name not in kinds
            or other.name not in kinds
            or rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        ):
            return convert(given, kind, other, rounding)
        bits = torch.from_numpy(np.array(given).view(words[given.itemsize]))
        found = bits.view(kinds[kind.name]).to(kinds[other.name])
        return found.view(torch.uint32 if found.itemsize == 4 else torch.uint16).numpy()

    patch.setattr(interpreter, "_convert_float", converted)


def describe_shapes_once(patch: pytest.MonkeyPatch) -> None:
    """Make tensors and block types of one shape share what describes it, as Triton itself makes it for the first."""
    new_tensor, new_block = core.tensor.__init__, core.block_type.__init__

    @cache
    def first_block(sizes: tuple[int, ...]) -> tuple[core.tuple, int, str, tuple[int, ...]]:
        made = core.block_type.__new__(core.block_type)
        new_block(made, core.int1, list(sizes))
        return made.shape, made.numel, str(made.shape), sizes

    @cache
    def first_tensor(sizes: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
        made = core.tensor.__new__(core.tensor)
        new_tensor(made, None, core.block_type(core.int1, list(sizes)) if sizes else core.int1)
        return made.shape, made.numel

    described: dict[tuple[int, int], tuple[dict[str, Any], Any]] = {}  # by a shape's and an element's place in memory

    def block(self: core.block_type, element: core.dtype, shape: Any) -> None:
        assert isinstance(shape, list | core.tuple)
        shared = type(shape) is core.tuple and type(element) is core.dtype
        if shared and (id(shape), id(element)) in described:
            vars(self).update(described[id(shape), id(element)][0])
            return
        self.element_ty = element
        sizes = shape.values if type(shape) is core.tuple else shape
        self.shape, self.numel, said, self.sizes = first_block(tuple(map(core._unwrap_if_constexpr, sizes)))
        self.name = f"<{said}, {element}>"
        if shared:
            described[id(shape), id(element)] = vars(self).copy(), shape  # which stays where it is

    def tensor(self: core.tensor, handle: Any, kind: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = first_tensor(kind.sizes if kind.is_block() else ())

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)


def unwrap_what_is_wrapped(patch: pytest.MonkeyPatch) -> None:
    """Look at the type of what may be a constant once for each type."""
    unwrap = core._unwrap_if_constexpr
    wrappers = list, tuple, core.tuple, core.constexpr
    is_plain = cache(lambda kind: not issubclass(kind, wrappers))
    patch.setattr(core, "_unwrap_if_constexpr", lambda value: value if is_plain(type(value)) else unwrap(value))


def see_equals_at_once(patch: pytest.MonkeyPatch) -> None:
    """Call dtypes equal that are one object, and tensors whose shapes are: `describe_shapes_once` makes them so."""
    equal, broadcast, cast = core.dtype.__eq__, TritonSemantic.broadcast_impl_value, TritonSemantic.cast

    def broadcast_others(self: TritonSemantic, one: Any, other: Any) -> tuple[Any, Any]:
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    def cast_others(self: TritonSemantic, given: Any, kind: core.dtype, rounding: str | None = None) -> Any:
        return given if given.dtype is kind.scalar else cast(self, given, kind, rounding)

    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)
    patch.setattr(TritonSemantic, "cast", cast_others)


def broadcast_as_numpy_computes(patch: pytest.MonkeyPatch) -> None:
    """Hand on two operands that need no conversion as they are, with the type that they have when broadcast.

    Those are of one dtype, numbers that the other's dtype holds, and pointers with offsets. What calls this computes
    with both together, so that the result has the shape. Others go Triton's way.
    """
    check, scalar = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    wide = core.int32, core.int64, core.float32
    common = cache(np.broadcast_shapes)
    block = cache(lambda kind, sizes: core.block_type(kind, list(sizes)))

    @cache
    def whole_number(value: int, kind: core.dtype) -> core.tensor:
        return scalar(interpreter.interpreter_semantic, value, kind)

    def operand(self: TritonSemantic, given: Any, beside: Any) -> Any:
        """Return a tensor; None for a number that is not held by the dtype of what is beside it."""
        if type(given) is core.tensor:
            return given
        if type(beside) is not core.tensor:
            return None
        kind = core.int32 if beside.dtype.is_ptr() else beside.dtype
        if type(given) is int and kind in wide and -(2**31) <= given < 2**31:
            return whole_number(given, kind)
        return scalar(self, given, kind) if type(given) is float and kind is core.float32 else None

    def shaped(given: core.tensor, sizes: tuple[int, ...]) -> core.tensor:
        kind = given.type
        if not sizes or (kind.is_block() and kind.sizes == sizes):
            return given
        made = core.block_type(given.dtype, list(sizes)) if given.dtype.is_ptr() else block(given.dtype, sizes)
        return core.tensor(given.handle, made)

    def checked(
        self: TritonSemantic, lhs: Any, rhs: Any, lhs_ptr: bool = False, rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[core.tensor, core.tensor]:  # fmt: skip
        one, other = operand(self, lhs, rhs), operand(self, rhs, lhs)
        if one is None or other is None:
            return check(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic_check, div_or_mod)
        kind, beside = one.dtype, other.dtype
        alike = kind is beside and (kind in wide if div_or_mod else type(kind) is core.dtype)
        if not (alike or (lhs_ptr and kind.is_ptr() and beside.is_int())):
            return check(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic_check, div_or_mod)
        sizes = common(*(part.type.sizes if part.type.is_block() else () for part in (one, other)))
        return shaped(one, sizes), shaped(other, sizes)

    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", checked)
