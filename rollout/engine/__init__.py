"""Schedule, run, commit: which sequences the next step computes, and what becomes of its tokens.

Read `engine`, then `scheduler`; `step_plan` is what passes to whatever computes a step. No threads, no locks, no torch.
"""

from samebit.rollout.engine.engine import Engine

__all__ = ["Engine"]
