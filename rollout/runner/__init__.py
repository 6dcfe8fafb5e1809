"""Compute a step: a plan in, tokens and their log-probabilities out.

`model_runner` goes through `step_inputs` (arrays on the host), `forward` (the module's call, whose contract is in
`logits`) and `sampler`, for which `seen_tokens` keeps what penalties count; `likely_tokens` finds the likeliest.
`images` computes what stands for those of prompts. The
`cuda_*` files are what a GPU does differently: `cuda_forward` calls with `cuda_step_arrays`, `cuda_graphs` records by
`cuda_recorder`, `cuda_pool_size` measures. Imports `engine` (its plan), `memory`, `requests`, `cache` (where
checkpoints are), `config`, `sampling_params`, `structured_outputs` and `samebit.kernels`; nothing above them.
"""
