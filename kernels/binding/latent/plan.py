"""Find out what `bind` has to know about the latent attention of a model."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from samebit.kernels.binding.families import BindingError
from samebit.kernels.binding.latent.family import LatentFamily
from samebit.kernels.binding.latent.forwards import (
    HeadFacts,
    LatentFacts,
    expansion_forward,
    latent_forward,
    latent_forward_without_positions,
)
from samebit.kernels.layout.kv_pages import LatentLayout
from samebit.kernels.layout.options import LatentOptions

Bound = tuple[Callable[..., Any], Any]
"""A forward and its facts."""


class LatentPlan:
    """Decides the facts of the attention layers, in the order of the traversal."""

    def __init__(self, prefix: str, family: LatentFamily, config: Any) -> None:
        self.prefix = prefix
        self.family = family
        self.config = config
        self.options: list[LatentOptions] = []
        self.inside: dict[str, Bound] = {}

    def layout(self) -> LatentLayout:
        """Return the layout of the latents of the layers found so far."""
        if not self.options:
            return LatentLayout(0, 0, 0)
        return LatentLayout(len(self.options), self.options[0].rank, self.options[0].rope)

    def computes(self, name: str) -> bool:
        """Return whether the module of this name is a part of attention that does not run its own forward."""
        return name in self.inside

    def part(self, name: str) -> Bound:
        """Return the forward of such a part."""
        return self.inside[name]

    def attention(self, name: str, module: nn.Module) -> Bound:
        """Plan one layer.

        Raises:
            BindingError: sizes that can not be computed, by name.
        """
        attributes = vars(module)
        heads = HeadFacts(attributes["num_heads"], attributes["qk_nope_head_dim"], attributes["v_head_dim"])
        rank, rope = attributes["kv_lora_rank"], attributes["qk_rope_head_dim"]
        self._check_sizes(name, heads, rank, rope)
        self._check_expansion(name, module, heads, rank)
        options = LatentOptions(len(self.options), attributes["scaling"], rank, rope)
        self.options.append(options)
        self.inside[f"{name}.{self.family.expansion}"] = expansion_forward, heads
        key = self.family.interleaved
        forward = latent_forward if self.family.rotated else latent_forward_without_positions
        return forward, LatentFacts(
            heads=heads,
            options=options,
            low_rank=attributes["q_lora_rank"] is not None,
            interleaved=not key or bool(self.config.to_dict()[key]),
        )

    def check_rotated(self, frequencies: Sequence[int]) -> None:
        """Check that each rotated element has its pair.

        Raises:
            BindingError: another number of frequencies than of pairs.
        """
        for pairs in frequencies:
            if self.options and 2 * pairs != self.options[0].rope:
                raise BindingError(
                    f"{self.prefix}: the rotary embedding has {pairs} frequencies, which turn {2 * pairs} elements; "
                    f"here qk_rope_head_dim={self.options[0].rope}; allowed: an even number, all of it rotated"
                )

    def _check_sizes(self, name: str, heads: HeadFacts, rank: int, rope: int) -> None:
        kv_heads = self.config.num_key_value_heads
        if kv_heads != heads.heads:
            raise BindingError(
                f"{self.prefix}: {name} has {heads.heads} heads and num_key_value_heads={kv_heads}; with latents each "
                "head has a key of its own, and Hugging Face can not run it either"
            )
        if min(heads.heads, heads.nope, heads.value, rank, rope) < 1:
            raise BindingError(
                f"{self.prefix}: {name} has qk_nope_head_dim={heads.nope}, qk_rope_head_dim={rope}, "
                f"v_head_dim={heads.value}, kv_lora_rank={rank}; allowed: at least 1 of each"
            )

    def _check_expansion(self, name: str, module: nn.Module, heads: HeadFacts, rank: int) -> None:
        """Check the projection whose weight attention reads in halves; one with an adapter is refused by `Plan`."""
        expansion = module.get_submodule(self.family.expansion)
        size = (heads.heads * (heads.nope + heads.value), rank)
        if type(expansion) is nn.Linear and (expansion.weight.shape != size or expansion.bias is not None):
            raise BindingError(
                f"{self.prefix}: {name}.{self.family.expansion} is {expansion}; exact is one of {size[1]} inputs and "
                f"{size[0]} outputs without a bias"
            )
