"""Choose the replica that computes a request: `router`, on the `places` that it knows and on what `shadow` has of each
replica's cache.

Plain Python on digests and counts, which knows neither replicas nor Ray. Imports `options` of `fleet`, and of
`samebit.rollout` the messages of `publishing`, the freeing of `cache`, and errors.
"""
