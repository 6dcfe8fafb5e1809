"""Carry weights through buckets in a GPU's memory (CUDA IPC). Not run on a GPU yet."""
