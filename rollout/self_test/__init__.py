"""Try at a worker's start whether this machine gives its model's rows the same bits by every way to compute them.

`self_test` compares, by the `routes` that a rollout and a trainer take, and `remembered` knows where it has passed
before. It stands on `runner` and imports nothing above it.
"""
