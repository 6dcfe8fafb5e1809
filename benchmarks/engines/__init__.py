"""Run engines, each in a process of its own, that are told what to generate, by lines of JSON over pipes.

`messages` is what both ends say, and needs the standard library alone; `process` is the end that asks, and `commands`
say how an engine is started; the others are programs: `samebit_engine`, `huggingface_engine`, and `vllm_engine` in an
environment of its own, without samebit's packages. `policy_messages` is what is said to an engine that samples for a
trainer, `vllm_policy`. `http_servers` asks servers over HTTP instead, samebit's and vLLM's own. `samebit_engine` alone
imports `samebit.kernels` and `samebit.rollout`.
"""
