"""Run verl's rollout servers: the actor with the worker, its replica, and how weights reach it.

The way through: `replica` starts and drives a `server`, the actor of Ray, from the process of the trainer's loop;
`requests` translates, `images` reads pictures, `steps` knows whose weights sampled, `gate` lets in, `adapters` knows
the trained adapter, `profiling` traces; weights come by `checkpoint_engine`; `launched` finds the replicas for
`metrics`. Imports the worker, `adapters`, `control`, `rollout.requests`, `structured_outputs`, `integrations.ray`, the
modules of `verl`, `routing` of its `trainer`, `samebit.weight_sync` and, of `samebit.kernels`, what a process has to
set up.
"""
