"""Bind layers that differ by their type, as Gemma 4's do: `plan` reads a model, `forwards` is what modules get, and
`experts` are those that a layer calls itself.

Imports `ops`, `layout` and, of `binding`, `attention`, `families`, `experts`, `lora` and `modules`.
"""
