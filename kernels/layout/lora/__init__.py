"""Describe low-rank adapters, and which of them the rows of a call go through."""
