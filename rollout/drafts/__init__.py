"""Guess tokens ahead, so that one step computes several of a sequence. No guess changes what is sampled: see `engine`.

The way through: `drafter`, which asks the `group` of each sequence's request, which looks up texts by their
`ngram_index`, or, where nothing is found, a model through the protocol `Proposer` (`samebit.rollout.engine.draft_model`
is one), which is asked by what `trust` makes of its last guesses. Imports `requests` and, of
`samebit.kernels`, `ops`.
"""
