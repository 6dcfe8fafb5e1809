"""The RL dialect of vLLM's server: token ids in and out (`generate`), and control: pause, sleep, weights."""
