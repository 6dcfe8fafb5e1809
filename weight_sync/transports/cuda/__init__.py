"""Carry weights through buckets in a GPU's memory (CUDA IPC).

The way through: `cuda_ipc` makes the two ends, `memory` shares what they have between them, `buckets` fills and empties
it, `scan` computes digests there. Imports `wire`, the rest of `transports`, and the floors below.
"""
