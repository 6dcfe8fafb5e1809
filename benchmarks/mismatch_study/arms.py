"""Name the arms of the study: who samples, and what the loss makes of a token's other probability."""

from dataclasses import dataclass

EXACT_BITS = 23
"""Explicit bits of a float32's mantissa."""


@dataclass(frozen=True)
class Arm:
    """Says how a run differs from the exact one.

    mantissa_bits: of the weights that sample; the trainer has all 23. correction: of the recipe's `--correction`.
    draws: other random numbers, which show what chance alone does. vllm: it samples, in bfloat16.
    """

    name: str
    mantissa_bits: int = EXACT_BITS
    correction: str = "clip"
    draws: int = 0
    vllm: bool = False

    @property
    def exact(self) -> bool:
        return self.mantissa_bits == EXACT_BITS and not self.vllm


_DOSES = (7, 4, 2)
_CORRECTIONS = {"none": "uncorrected", "clip": "clipped", "truncate": "truncated"}

ARMS = {
    arm.name: arm
    for arm in (
        Arm("exact"),
        Arm("exact-other-draws", draws=1),
        *(Arm(f"vllm-{name}", correction=correction, vllm=True) for correction, name in _CORRECTIONS.items()),
        *(Arm(f"{bits}-bits-{name}", bits, correction) for bits in _DOSES for correction, name in _CORRECTIONS.items()),
    )
}
"""All arms by name. Eight significant bits, seven of them explicit, are bfloat16's."""
