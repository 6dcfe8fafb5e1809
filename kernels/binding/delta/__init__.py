"""Bind Gated DeltaNet layers: `plan` reads a model, by `family`, which tells families apart; its layers get `mixer`.

Imports `ops`, `layout` and, of `binding`, `families`, `dense` and `lora`.
"""
