"""Describe the model families that are bound exactly.

`family` holds what tells one from another, and `expert_family`, `latent_family` and `delta_family` what does so of such
layers. Families are listed in `dense`, `mixtures` (of experts), `latents`, `mambas`, `deltas` and `short_convs`, and
found by the name of a model's class in `known`. `inexact` names what no family computes exactly.

Imports, of `binding`, `epilogue` and `vision`.
"""
