"""Stand in front of several workers with the same model: choose who computes a request, and keep them alike.

The way through: `fleet` is the front, a worker made of workers; `carrier` takes requests to replicas and back to their
`handle`; `routing` chooses the replica, by the digests of a prompt's blocks; `crew` starts and restarts replicas, as
often as `tries` allows, on the event loop of `background`; `weights` and `adapters` reach all of them; `arrivals` knows
which calls have come to a replica, whatever their order; `options` is how a fleet is run. What carries its calls to a
`replica` is a `port.ReplicaPort`: an actor of Ray (`integrations/ray`), or whatever else a test puts there.

Imports what a worker's callers have, the words of `adapters`, `control`, `cache`, `publishing`, `requests` and `keys`,
`models.hub`, and `samebit.weight_sync`; no model and no kernel.
"""
