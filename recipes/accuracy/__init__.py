"""Teach a small model with latents a task, and answer few-shot prompts with the prefix cache on and off.

`benchmarks/accuracy.py` runs it: `models`, taught the `task` by `teaching` (`indexer`: the choice of tokens too), then
`answers`. Imports `samebit.rollout`, and of `recipes` the task and how it is taught.
"""
