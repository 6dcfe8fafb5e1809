"""Bind a decoder layer as one call in a rollout: `attention`, `latent` of attention over latents, `experts` of the
experts behind either; `one_call` makes the call, and `decoder` those of all layers; `step` makes one of a whole step,
from token ids to logits.

Each says when, and with which parameters; `linears` finds those of linear layers, `norms` those of norms, `untouched`
finds out whether modules do no more than `bind` gave them, `known` finds parameters again in the next step. Imports
`ops`, `layout` and, of `binding`, `attention`, `families`, `modules`, `latent`, `experts` and `lora`.
"""
