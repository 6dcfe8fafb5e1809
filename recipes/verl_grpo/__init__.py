"""Run GRPO in verl with samebit as its rollout: the tiny run of `make verl-grpo`, an example for GPUs."""
