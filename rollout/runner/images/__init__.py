"""Compute what stands for images in a step: `rows` says which rows, `features` computes and keeps theirs.

Imports `engine` (its plan and its errors), `requests` and `samebit.kernels`.
"""
