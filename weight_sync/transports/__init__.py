"""Carry a link's bytes: over shared memory, by broadcast, or over CUDA IPC (`cuda`).

The way through: `shared_memory` makes the two ends, which are in `unix_socket`: a `channel` for messages, an `endpoint`
where the receiver finds it, `shared_buckets` for the bytes, within what a `container` allows. `broadcast` sends over
`groups` of processes. `addresses` names, in a call to a worker elsewhere, the link that its weights come over. Imports
`wire` and the floors below it.
"""
