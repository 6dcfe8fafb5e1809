"""A decoder layer of attention and a gated MLP as one call in a rollout: when, and with which parameters."""
