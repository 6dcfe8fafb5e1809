"""Bind blocks of routed experts: `plan` reads a model, by `families.expert_family`, which tells families apart.

`forwards` is what modules get; `routes` notes which experts were chosen, where the caller asks for it. Imports `ops`,
`layout` and, of `binding`, `families`.
"""
