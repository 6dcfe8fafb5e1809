"""Bind latent attention (MLA): `plan` reads a model, by `families.latent_family`, which tells families apart.

`forwards` is what attention gets, `indexer` what chooses the tokens that sparse attention reads. Imports `ops`,
`layout` and, of `binding`, `families` and `lora`.
"""
