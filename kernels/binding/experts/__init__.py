"""Blocks of routed experts: `family` tells families apart, `plan` reads a model, `forwards` is what modules get."""
