"""Keep the adapters of a worker: those of a peft model that it shares, and those that it was given by name.

`registry` knows which adapter a request goes through; `layout` finds, with peft, what an adapter's config means for a
model; `loading` reads one in.
"""
