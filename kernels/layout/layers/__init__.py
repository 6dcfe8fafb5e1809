"""Say what a whole layer that is one call is given: `weights` for all of them, and `latent` for latent attention."""
