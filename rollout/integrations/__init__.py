"""Put the worker into other systems. Each package needs that system to be installed, and is imported by name.

`http` serves it, `ray` puts it into actors, `verl` and `trl` into trainers, and each may import what `samebit.rollout`
has but `cli`. `links` names where a worker behind calls gets weights from, `gloo_weights` sends them to a server; both
import `samebit.weight_sync` alone.
"""
