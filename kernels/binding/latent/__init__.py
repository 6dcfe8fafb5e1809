"""Latent attention (MLA): `family` tells families apart, `plan` reads a model, `forwards` are what its modules get."""
