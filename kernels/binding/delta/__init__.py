"""Bind Gated DeltaNet layers: `plan` reads a model, by `families.delta_family`, which tells families apart; their
mixers get `mixer`, and `layer` says what a decoder layer of one is in one call.

Imports `ops`, `layout` and, of `binding`, `families`, `modules`, `layers` and `lora`.
"""
