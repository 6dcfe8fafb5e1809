"""Study whether mismatch matters: GRPO with samplers that differ from the trainer by known amounts.

`arms` names the runs; `samplers` makes who samples in each, `vllm_sampler` vLLM, from folders of `untied`, which
`freshness` distrusts; `study` is the program; `figure` draws what it wrote. Imports `engines`, `samebit.recipes`,
`samebit.kernels`, `samebit.rollout` and `samebit.weight_sync`.
"""
