"""Tell a router elsewhere which blocks can be hit: `journal`.

Imports nothing of ours: a fleet reads its messages without a cache.
"""
