"""Run a worker's commands on its engine: one thread, one lock, one set of weights.

`intake` makes requests of what callers submit, `generation_thread` steps the engine, `turn_lock` lets commands in
between two steps, `shelter` keeps signal handlers away from them, `draining` waits until what has started is finished,
`pausing` stands still, `deliveries` take results to their callers, `sleep` gives memory back, `worker_adapters` loads
adapters, `weights` is the folder of what changes them. Imports the engine; knows nothing of models' code.
"""
