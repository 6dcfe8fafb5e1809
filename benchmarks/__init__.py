"""Measure what samebit costs and gains; a module is a command (`python benchmarks/rollout.py --json FILE`).

`contestants` are what is measured, `workloads` what they compute, `rounds` how they take turns and what is written.
"""
