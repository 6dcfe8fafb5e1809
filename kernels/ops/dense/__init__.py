"""A decoder layer of attention and a gated MLP as one operation: its contract, and what fits it."""
