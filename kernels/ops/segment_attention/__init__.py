"""Define attention within segments, which vision towers compute: `operation`, and its `gradients`.

Imports `layout` and, of `ops`, `dispatch`.
"""

from samebit.kernels.ops.segment_attention.operation import segment_attention

__all__ = ["segment_attention"]
