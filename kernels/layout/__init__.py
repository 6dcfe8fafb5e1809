"""Say where the rows, pages and states of one call lie; hold the constants that kernels of all devices share.

Everything in `samebit.kernels` may import this floor; it imports none of the others. The way through it: `call_rows`
(which row is whose), `attention_work` and `device_layout` (the same for a GPU), `forward_context` (rows and memory of a
call), `kv_pages` and `states` (what that memory is, from `memory_pool`), `transfer` (how it gets to a device), `lora`
(which adapter a row goes through), `images` (which rows are those of images), `vision` (the rows of a vision tower),
`layers` (what a layer is given that is one call). Below all that: `grids`, `device`, `options`, `decays` and
`shape_checks`, constants and checks.
"""
