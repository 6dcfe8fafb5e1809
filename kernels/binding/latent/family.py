"""Say what tells the latent attention of one family from that of another."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentFamily:
    """One family's attention over latents.

    Attributes:
        interleaved: the config's key for whether the two elements that are rotated together stand side by side; empty
            where they always do.
        rotated: False where the part of a key that all heads share is not rotated: attention knows no positions.
    """

    interleaved: str = ""
    rotated: bool = True

    expansion = "kv_b_proj"
    """Names the projection of a latent to each head's key and value."""
