"""Serve the RL dialect of vLLM's server: token ids in and out, and control: pause, sleep, weights.

The way through: `routes`, then `generate`; `requests` and `options` say what may be asked, `weights` and `adapters`
take what clients bring, from `folders` that the operator named. Imports the modules of `http`, `openai` and `metrics`
there, `control`, `fleet` and `samebit.weight_sync`.
"""
