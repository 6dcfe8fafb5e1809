"""Bind a decoder layer as one call in a rollout: `layer` of attention and a gated MLP, `latent` of attention over
latents; and what runs such layers, `decoder`.

Each says when, and with which parameters; `linears` finds those of linear layers, `untouched` finds out whether modules
do no more than `bind` gave them, `known` finds a layer's parameters again in the next step. Imports `ops`, `layout`
and, of `binding`, `modules`, `latent` and `lora`.
"""
