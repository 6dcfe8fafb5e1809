"""Define a decoder layer of attention and a gated MLP as one operation: `layer`, its contract and what fits it.

Imports `layout` and, of `ops`, `dispatch` and `rope`.
"""
