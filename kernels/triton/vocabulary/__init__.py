"""Compute over the vocabulary: log-probabilities, entropies and draws, from the sums of the same chunks.

The way through: `chunks` sums exponentials, `logprobs` and `sampling` read the sums, `filters` rules tokens out before.
Imports `layout` and, of `triton`, `numeric` and `tiles`.
"""
