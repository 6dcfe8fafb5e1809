"""A decoder layer of attention and a gated MLP as one kernel on the CPU."""
