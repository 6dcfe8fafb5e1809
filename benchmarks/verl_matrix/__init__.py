"""Many kinds of runs in verl, each with a mismatch that must be 0: `make verl-matrix`."""
