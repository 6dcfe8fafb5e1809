"""Describe low-rank adapters, and which of them the rows of a call go through: `adapters`.

Imports `options` of `layout`.
"""
