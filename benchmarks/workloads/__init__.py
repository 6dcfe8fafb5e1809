"""Define the workloads: models by shape, prompts, requests that begin alike or share nothing."""
