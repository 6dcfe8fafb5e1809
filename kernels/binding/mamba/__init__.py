"""Bind Mamba2 layers: `plan` reads a model, by `families.family`, which tells families apart; their mixers get
`mixer`.

Imports `ops`, `layout` and, of `binding`, `families` and `residual`.
"""
