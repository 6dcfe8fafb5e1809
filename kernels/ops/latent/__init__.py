"""Define attention over latents (MLA): `attention` itself, and `heads`, the products around it.

`selection` chooses the tokens that sparse attention reads. Imports `layout` and, of `ops`, `dispatch` and `errors`.
"""
