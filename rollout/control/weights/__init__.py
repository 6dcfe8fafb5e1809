"""Manage a worker's weights: whose they are and where they sleep (`worker_weights`), and how they change
(`transaction`).

`spill` keeps a copy in a file, `links_in_use` ends waits for a sender.
Imports the rest of `control`, `models`, `binding` of `samebit.kernels`, and `samebit.weight_sync`.
"""
