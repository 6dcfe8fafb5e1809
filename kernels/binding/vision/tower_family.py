"""Say how Hugging Face builds the vision tower of a family, for those whose towers are bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class TowerFamily:
    """Names the classes of a tower of transformer blocks over patches, whose patches are merged to tokens.

    Attributes:
        patches: makes hidden states of patches, by a convolution whose kernels do not overlap.
        angles: those of patches, by row and column; over the versions of transformers.
        attention: among the patches of an image, or of a window of one.
        mlp: that of a block.
        mlp_names: of its gate (empty for none), up and down.
        norm: its RMSNorm; empty where all are torch's LayerNorm.
        containers: those that only call others.
        axes: how the text model's frequencies are dealt out to time, height and width: one block of them after the
            other, or in turns.
        sections: how many turn by each, where the config has no ``mrope_section``; empty where it must have one.
    """

    patches: str
    angles: tuple[str, ...]
    attention: str
    mlp: str
    mlp_names: tuple[str, str, str]
    containers: tuple[str, ...]
    norm: str = ""
    axes: Literal["blocks", "turns"] = "blocks"
    sections: tuple[int, ...] = ()

    def axes_of(self, sections: Sequence[int] | None, count: int) -> torch.Tensor | None:
        """Return which of an image's positions, 0 for time, 1 for height and 2 for width, each frequency turns by.

        Args:
            sections: the config's; None where it has none.
            count: of the frequencies.

        Returns:
            ``[count]``; None where nothing says it.
        """
        sections = self.sections if sections is None else sections
        if len(sections) != 3 or (self.axes == "blocks" and sum(sections) != count):
            return None
        if self.axes == "blocks":
            return torch.repeat_interleave(torch.arange(3, device="cpu"), torch.tensor(sections, device="cpu"))
        axes = torch.zeros(count, dtype=torch.long, device="cpu")
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes


QWEN2_VL = TowerFamily(
    patches="PatchEmbed",
    angles=("VisionRotaryEmbedding", "Qwen2VLVisionRotaryEmbedding"),
    attention="VisionAttention",
    mlp="VisionMlp",
    mlp_names=("", "fc1", "fc2"),
    containers=("Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionBlock", "PatchMerger"),
)

QWEN2_5_VL = TowerFamily(
    patches="Qwen2_5_VisionPatchEmbed",
    angles=("Qwen2_5_VisionRotaryEmbedding", "Qwen2_5_VLVisionRotaryEmbedding"),
    attention="Qwen2_5_VLVisionAttention",
    mlp="Qwen2_5_VLMLP",
    mlp_names=("gate_proj", "up_proj", "down_proj"),
    norm="Qwen2_5_VLRMSNorm",
    containers=("Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionBlock", "Qwen2_5_VLPatchMerger"),
)


def qwen3(prefix: str, *, sections: tuple[int, int, int]) -> TowerFamily:
    """Return the tower of Qwen3-VL and of what came after it, whose classes have this prefix."""
    return TowerFamily(
        patches=f"{prefix}VisionPatchEmbed",
        angles=(f"{prefix}VisionRotaryEmbedding",),
        attention=f"{prefix}VisionAttention",
        mlp=f"{prefix}VisionMLP",
        mlp_names=("", "linear_fc1", "linear_fc2"),
        containers=tuple(f"{prefix}Vision{part}" for part in ("Model", "Block", "PatchMerger")),
        axes="turns",
        sections=sections,
    )


QWEN3_VL = qwen3("Qwen3VL", sections=(24, 20, 20))
QWEN3_VL_MOE = qwen3("Qwen3VLMoe", sections=(24, 20, 20))
QWEN3_5 = qwen3("Qwen3_5", sections=(11, 11, 10))
QWEN3_5_MOE = qwen3("Qwen3_5Moe", sections=(11, 11, 10))
