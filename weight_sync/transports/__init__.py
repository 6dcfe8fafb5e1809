"""The ways in which a link's bytes travel: shared memory, broadcast, and CUDA IPC (`cuda`, not run on a GPU yet).

Imports `wire` and the floors below it.
"""
