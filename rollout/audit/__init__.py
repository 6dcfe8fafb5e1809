"""Answer for `samebit check` and `samebit bench`: is the promise kept on this machine, and how fast is it?

The way through: `audit` puts the rows together, `compare` counts the bits that differ, `trainer_layouts` lays
sequences out as trainers do, and `workers` configures who is compared; on these, `gemm_rows`, `prefix_cache`,
`recurrent_states`, `choices`, `adapters` and `weight_updates` (with its `sending_process`) make some rows each;
`images` makes those that are asked for. `speed` is `samebit bench`.

Imports the `worker` and, of what it is made of, `config`, `adapters`, `control`, `memory` and `models`;
`samebit.kernels` and `samebit.weight_sync`.
"""
