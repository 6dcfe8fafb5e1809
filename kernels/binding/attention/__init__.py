"""Bind attention with keys and values: `plan` reads a model, by `families.family`, which tells families apart, and
`forwards` has what its modules compute.

Imports `ops`, `layout` and, of `binding`, `families`, `lora`, `modules`, `residual` and `shared_layer`.
"""
