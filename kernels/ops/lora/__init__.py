"""Compute what low-rank adapters add to linear layers: `low_rank`.

Imports `layout` and, of `ops`, `dispatch` and `linear`.
"""
