"""Train by GRPO, RLOO or AsyncGRPO in TRL with exact rollouts: `run.py`, on a model and a task made by `task`."""
