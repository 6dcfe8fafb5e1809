"""Compute over the vocabulary: log-probabilities, entropies and draws, from the sums of the same chunks."""
