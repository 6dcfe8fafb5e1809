"""Try at a worker's start whether this machine gives its model's rows the same bits by every way to compute them.

`self_test` compares, by the `routes` that a rollout and a trainer take, and `remembered` knows where it has passed
before. Imports `runner`, what lies below it, and `samebit.kernels`; nothing above.
"""
