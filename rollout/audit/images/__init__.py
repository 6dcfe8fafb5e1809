"""Check prompts with images, for `samebit check --images`: `prompts` makes them and has a trainer score what was
sampled behind them, `rows` compares.

Imports the rest of `audit`, the `worker` and `requests`, and `samebit.kernels`.
"""
