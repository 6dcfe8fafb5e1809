"""Run GRPO in verl with samebit as its rollout: the tiny run of `make verl-grpo`, an example for GPUs.

The way through: `run`, which writes the files of `task` by `shapes`, looks at verl's `options`, and starts it by
`launch`, with `progress` before the first step and `mismatch` of each. `reward` and `sampler` run inside verl. Imports
`samebit.rollout.integrations.verl`, `samebit.kernels`, and of `recipes` its task and built-in model.
"""
