"""GRPO in verl with samebit as its rollout: the tiny run of `make verl-grpo`, its matrix, an example for GPUs."""
