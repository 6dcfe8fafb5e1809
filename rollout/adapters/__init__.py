"""Keep the adapters of a worker: those of a peft model that it shares, and those that it was given by name.

The way through: `registry` knows which adapter a request goes through; `loading` reads one in; `layout` finds, with
peft, what an adapter's config means for a model, by the names that its layers have with vision around it or without
(`names_with_vision`), and `base` which model it is for; `pinned` finds the commits of names once. Imports `errors`,
`models`, `samebit.weight_sync` and, of `samebit.kernels`, `binding` and `layout`.
"""
