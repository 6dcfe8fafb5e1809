"""Define routed experts: `routing` chooses the experts of a row and their weights, `routed` computes with them;
`block` is both in one call, behind that of a decoder layer.

Imports `layout` and, of `ops`, `dispatch`, `activation`, `linear` and `layers`.
"""
