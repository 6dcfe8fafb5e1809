"""Routed experts: `routing` chooses the experts of a row and their weights, `routed` computes with them."""
