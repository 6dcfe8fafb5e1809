"""The contestants that compute a workload: samebit, Hugging Face, the cheapest possible step, the plain recurrence."""
