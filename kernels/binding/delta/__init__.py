"""Gated DeltaNet: `family` tells families apart, `plan` reads a model, `mixer` is the forward that its layers get."""
