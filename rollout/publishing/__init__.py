"""Tell a fleet's router which blocks of a cache can be hit: `journal`.

Imports nothing of ours: a fleet reads its messages without a cache.
"""
