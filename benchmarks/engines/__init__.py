"""Run engines, each in a process of its own, that are told what to generate, by lines of JSON over pipes.

`messages` is what both ends say, and needs the standard library alone; `process` is the end that asks; the others are
programs, of which those of vLLM run in an environment of its own, without samebit's packages. `policy_messages` is what
is said to an engine that samples for a trainer, `vllm_policy`. `http_servers` asks servers over HTTP instead, samebit's
and vLLM's own.
"""
