"""Train with samebit: these scripts are the first thing that a user runs.

The way through: `grpo`, whose loop is the whole of it, `sampling` and `learner`, its two halves, and `grpo_loss`; then
`sync` (how weights get to the worker) and `grpo_async`, one step off policy. `settings` are all options, `experiment`
what the scripts share. `accuracy`, `trl_grpo` and `verl_grpo` are folders of other runs. Imports what a user may:
`samebit.kernels`, `samebit.rollout` and its integrations, `samebit.weight_sync`.
"""
