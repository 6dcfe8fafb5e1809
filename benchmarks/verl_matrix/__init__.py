"""Run verl in many ways, each with a mismatch that must be 0: `make verl-matrix`."""
