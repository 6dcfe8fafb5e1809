"""Say what memory the steps of a worker read and write, and how much of it a configuration buys.

`shape` describes and allocates a model's pages, states and routes; `pool_sizes` counts blocks, checkpoints and held
states. Imports `config`, `cache` (where checkpoints are), `samebit.kernels` and `samebit.weight_sync.transports` (what
a container may have); knows nothing of how a step is computed.
"""
