"""Measure what samebit costs and gains; a module is a command (`python benchmarks/rollout.py --json FILE`).

`contestants` are what is measured, `workloads` what they compute, `rounds` how they take turns and what is written;
`engines` run in processes of their own, `mismatch_study` and `verl_matrix` are studies of many runs. Read a command,
then what it takes of these. Imports whatever it measures: `samebit.kernels`, `samebit.weight_sync`, `samebit.rollout`
and `samebit.recipes`, none of which imports this package.
"""
