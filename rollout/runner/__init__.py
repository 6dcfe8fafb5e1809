"""Computes a step: a plan in, tokens and their log-probabilities out.

`model_runner` goes through `step_inputs` (arrays on the host), `forward` (the module's call, whose contract is in
`logits`) and `sampler`. `pool_sizes` says what memory buys. `step_arrays` and the `cuda_*` files are what a GPU does
differently.
"""
