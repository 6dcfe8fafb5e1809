"""Manage a worker's weights: whose they are (`worker_weights`), and how they change (`transaction`).

`links_in_use` ends waits for a sender. Imports the rest of `control`, `models`, `binding` of `samebit.kernels`, and
`samebit.weight_sync`.
"""
