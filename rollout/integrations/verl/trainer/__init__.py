"""Hold what runs in verl's trainer: its engine with samebit's forward, and its end of a rollout server.

The way through: `engine` binds verl's model, where `exactness` finds nothing against it, and gives it `fused_forward`;
`lora` is an adapter of verl's, `routing` compares experts, `images` hands pictures on; `rollout` drives a server.
Imports `adapters`, `integrations.ray`, the modules of `verl`, `samebit.weight_sync` and, of `samebit.kernels`,
`binding`.
"""
