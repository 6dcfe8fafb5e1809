"""Put the worker into other systems. Each package needs that system to be installed, and is imported by name.

`http` serves it, `ray` puts it into actors, `verl` and `trl` into trainers, and each may import what `samebit.rollout`
has but `cli`. `gloo_weights` sends weights to a server; it imports `samebit.weight_sync` alone.
"""
