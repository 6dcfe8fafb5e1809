"""Define routed experts: `routing` chooses the experts of a row and their weights, `routed` computes with them.

Imports `layout` and, of `ops`, `dispatch`, `activation` and `linear`.
"""
