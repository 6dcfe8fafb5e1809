"""Find where the last tokens of a text stand in another: `chains`, on the host whatever computes the model.

Imports `base`.
"""
