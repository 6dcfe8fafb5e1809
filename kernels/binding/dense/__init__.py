"""Bind a decoder layer of attention and a gated MLP as one call in a rollout.

`layer` says when, and with which parameters; `untouched` finds out whether modules do no more than `bind` gave them.
Imports `ops`, `layout` and, of `binding`, `modules` and `lora`.
"""
