"""Bind what turns images into embeddings of a model's tokens, for the families whose `VisionFamily` has a tower.

`tower_family` says how Hugging Face builds a tower, `plan` finds the forward of each of its modules, `forwards` has
these. `given` holds the images of a call, `rows` finds their tokens and what rotates them; `wrapping` is the forward of
the module that holds text model and tower, `features` runs a tower alone.

Imports `ops`, `layout` and, of `binding`, `attached`, `binding`, `families`, `lora`, `modules` and `wrapped`.
"""
