"""Hand rows of a flat array to a micro-kernel as one argument, instead of three by position."""

from typing import Any, NamedTuple

from numba import types


class Rows(NamedTuple):
    """Names rows of a flat array: the first begins at element ``at``, each of the others ``stride`` further on."""

    array: Any
    at: int
    stride: int


def unpacked(context: Any, builder: Any, kind: Any, rows: Any) -> tuple[Any, Any, Any, Any]:
    """Return the type of the array, the array, ``at`` and ``stride``, as `vectors.row_of` takes them."""
    array, at, stride = (builder.extract_value(rows, field) for field in range(3))
    array_type, at_type, stride_type = kind.types
    at = context.cast(builder, at, at_type, types.int64)
    return array_type, array, at, context.cast(builder, stride, stride_type, types.int64)
