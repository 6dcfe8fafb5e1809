"""Blocks of routed experts: `family` tells families apart, `plan` reads a model, `forwards` is what modules get.

`routes` notes which experts were chosen, for who asks.
"""
