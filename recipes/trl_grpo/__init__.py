"""Train by GRPO, RLOO or AsyncGRPO in TRL with exact rollouts: `run`, on a model and a task made by `task`.

Imports `samebit.rollout.integrations.trl`, and of `recipes` its task and problems.
"""
