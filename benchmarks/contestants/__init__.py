"""Compute a workload as its contestants: samebit, Hugging Face, the cheapest possible step, the plain recurrence."""
