"""Bind gated short convolutions: `plan` reads a model, and its layers get `mixer`.

Imports `ops`, `layout` and, of `binding`, `families`, `lora` and `residual`.
"""
