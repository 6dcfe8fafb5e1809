"""Stand in front of several workers with the same model: choose who computes a request, and keep them alike.

`router` chooses, by the digests of a prompt's blocks, on what `shadow` knows of each replica's cache. `Fleet` is the
front: a worker that is made of workers. What carries its calls to a replica is a `ReplicaPort`: an actor of Ray
(`integrations/ray`), or whatever else a test puts there.
"""
