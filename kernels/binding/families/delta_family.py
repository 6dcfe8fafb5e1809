"""Say what tells the Gated DeltaNet layers of one family from those of another."""

from dataclasses import dataclass
from typing import Literal

Projections = Literal["by_key_head", "joined", "apart", "by_channel"]

_INPUTS: dict[Projections, tuple[tuple[str, ...], ...]] = {
    "by_key_head": (("in_proj_qkvz", "in_proj_ba"),),
    "joined": (("in_proj_qkv", "in_proj_z", "in_proj_b"), ("in_proj_a",)),
    "apart": (("q_proj", "k_proj", "v_proj"), ("g_proj", "b_proj", "a_proj")),
    "by_channel": (("q_proj", "k_proj", "v_proj"), ("g_a_proj", "b_proj", "forget_gate.f_a_proj")),
}


@dataclass(frozen=True)
class DeltaFamily:
    """Describes one family's Gated DeltaNet layers.

    Attributes:
        projections: ``by_key_head``: ``in_proj_qkvz`` and ``in_proj_ba``, whose outputs stand together per key head;
            ``joined``: ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``; ``apart``: ``q_proj``,
            ``k_proj``, ``v_proj``, ``g_proj`` (the gate), ``b_proj`` and ``a_proj``; ``by_channel``: the same of q, k,
            v and b, the gate by ``g_a_proj`` and ``g_b_proj``, and a ``forget_gate`` with a number for each channel of
            a key (Kimi Delta Attention); its norm's gate is a sigmoid.
        norm: the name of the gated norm in the layer.
        out: the name of the projection behind it.
        negative_eigenvalues: the config's key for whether beta goes up to 2; empty where it never does.
        mixer: ends the class name of such a layer.
    """

    projections: Projections
    norm: str = "norm"
    out: str = "out_proj"
    negative_eigenvalues: str = ""
    mixer: str = "GatedDeltaNet"

    gated_norms = ("RMSNormGated",)
    """Ends the class names of its norm."""

    foreign_norms = ("FusedRMSNormGated",)
    """Names the norm classes that Hugging Face takes from flash-linear-attention, where that is installed."""

    @property
    def inputs(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the projections of its input, those that are multiplied together in one tuple."""
        return _INPUTS[self.projections]

    @property
    def by_channel(self) -> bool:
        """Return whether each channel of a key decays by itself."""
        return self.projections == "by_channel"
