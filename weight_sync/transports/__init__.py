"""Carry a link's bytes: over shared memory, by broadcast, or over CUDA IPC (`cuda`, not run on a GPU yet).

Imports `wire` and the floors below it.
"""
