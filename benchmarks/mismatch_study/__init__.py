"""Does mismatch matter? GRPO with samplers that differ from the trainer by known amounts, and what a loss can do.

`arms` names the runs; `samplers` makes who samples in each, `vllm_sampler` vLLM, from folders of `untied`, which
`freshness` distrusts; `study` is the program; `figure` draws what it wrote.
"""
