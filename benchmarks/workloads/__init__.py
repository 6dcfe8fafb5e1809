"""Define the workloads: models by shape, prompts, requests that begin alike or share nothing.

The way through: `models` (`mismatch_models`: smaller ones), then `workload`, which all contestants compute; `served` is
what engines in processes of their own are asked, `shared_prefix` and `unshared` are for prefix caches, `trainers`
compute log-probabilities, `weight_changes` trains to see what a step changes. Imports `engines`, `rounds`,
`samebit.recipes`, `samebit.kernels`, `samebit.rollout` and `samebit.weight_sync`.
"""
