"""Say what a whole layer of latent attention that is one call is given: `latent`."""
