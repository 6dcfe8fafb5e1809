"""Run a worker's commands on its engine: one thread, one lock, one set of weights.

`intake` makes requests of what callers submit, `generation_thread` steps the engine, `turn_lock` lets commands in
between two steps, `shelter` keeps signal handlers away from them, `draining` waits until what has started is finished,
`pausing` stands still, `deliveries` take each `delivery` to its caller, `sleep` gives memory back, `worker_status` says
what may be done now, `worker_adapters` loads adapters, `compute_threads` set up what computes, `weights` is the folder
of what changes them. Imports `engine`, `cache`, `requests`, `structured_outputs`, `adapters`, `samebit.weight_sync`,
and of `samebit.kernels` the names of adapters, the setup of threads and the way memory goes back to the system
(`layout`); knows nothing of models' code.
"""
