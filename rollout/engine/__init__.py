"""Schedule, run, commit: which sequences the next step computes, and what becomes of its tokens.

The way through: `engine`, then `scheduler`, which takes from `waiting_queue`; `step_plan` is what passes to whatever
computes a step, `drawn_rows` what comes back. `draft_model` guesses for a step with a second model. `failures` words
what is wrong with one request alone, `counters` count. Imports `cache`, `drafts`, `requests` and, of
`samebit.weight_sync`, `in_place`, which notices writes to weights that were not announced. No threads, no locks, no
torch.
"""

from samebit.rollout.engine.engine import Engine

__all__ = ["Engine"]
