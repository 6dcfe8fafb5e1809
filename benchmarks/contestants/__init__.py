"""Compute a workload as its contestants: samebit, Hugging Face, the cheapest possible step, the plain recurrence.

`samebit_worker` and `huggingface` run a whole workload; `floor` is the least that a step can cost. Of layers:
`recurrent_cpu`, `recurrent_delta_cpu` and `recurrent_cuda` are plain recurrences, `expert_layers` routed experts.
`verl_contestant` puts `verl_huggingface` into verl, `paced_replicas` stand in for a fleet's, `weight_sender` is a
trainer's process. Imports `engines`, `workloads`, `rounds`, and what samebit's contestants are made of:
`samebit.kernels`, `samebit.rollout`, `samebit.weight_sync`.
"""
