"""Lay out what layers with a recurrent state keep of a sequence: `memory` of all kinds, `mamba` and `delta` of each."""
