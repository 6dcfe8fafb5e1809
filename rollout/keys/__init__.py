"""Hold what is secret: the key that a fleet's block digests are made with (`digest_key`).

Imports nothing of ours.
"""
