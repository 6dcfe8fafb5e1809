"""One thread, one lock, one set of weights: what a worker's commands do to its engine.

`generation_thread` steps the engine, `turn_lock` lets commands in between two steps, `shelter` keeps signal handlers
away from them, `draining` waits until what has started is finished, `deliveries` take results to their callers, `sleep`
gives memory back, `weights` is the folder of what changes them. Imports the engine; knows nothing of models' code.
"""
