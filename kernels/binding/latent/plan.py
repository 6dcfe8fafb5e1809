"""Find out what `bind` has to know about the latent attention of a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import transformers
from torch import nn

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.families.latent_family import LatentFamily
from samebit.kernels.binding.latent.forwards import (
    HeadFacts,
    LatentFacts,
    expansion_forward,
    latent_forward,
    latent_forward_without_positions,
)
from samebit.kernels.binding.latent.indexer import IndexerFacts, indexer_forward, weights_forward
from samebit.kernels.layout.kv_pages import LatentLayout, SparseLayout
from samebit.kernels.layout.options import IndexOptions, LatentOptions


class LatentPlan:
    """Decides the facts of the attention layers, in the order of the traversal."""

    def __init__(self, prefix: str, family: LatentFamily, config: Any) -> None:
        self.prefix = prefix
        self.family = family
        self.config = config
        self.options: list[LatentOptions] = []
        self.indexed: list[IndexOptions | None] = []
        self.inside: dict[str, Attachment | None] = {}
        self.indexers: list[str] = []

    def layout(self) -> LatentLayout | SparseLayout:
        """Return the layout of the latents of the layers found so far."""
        if not self.options:
            return LatentLayout(0, 0, 0)
        first, indexers = self.options[0], [options for options in self.indexed if options is not None]
        if not indexers:
            return LatentLayout(len(self.options), first.rank, first.rope)
        indexed = tuple(options is not None for options in self.indexed)
        return SparseLayout(first.rank, first.rope, indexers[0].size, indexed)

    def computes(self, name: str) -> bool:
        """Return whether the module of this name is a part of attention that does not run its own forward."""
        return name in self.inside

    def part(self, name: str) -> Attachment | None:
        """Return the forward of such a part; None where it is never called."""
        return self.inside[name]

    def is_of_indexer(self, name: str) -> bool:
        """Return whether the module of this name is an indexer, or in one: nothing there has a gradient."""
        return any(f"{name}.".startswith(f"{indexer}.") for indexer in self.indexers)

    def attention(self, name: str, module: nn.Module) -> Attachment:
        """Plan one layer.

        Raises:
            BindingError: sizes that can not be computed, by name.
        """
        attributes = vars(module)
        heads = HeadFacts(attributes["num_heads"], attributes["qk_nope_head_dim"], attributes["v_head_dim"])
        rank, rope = attributes["kv_lora_rank"], attributes["qk_rope_head_dim"]
        self._check_sizes(name, heads, rank, rope)
        self._check_expansion(name, module, heads, rank)
        pages = len(self.options) + sum(index is not None for index in self.indexed)
        options = LatentOptions(pages, attributes["scaling"], rank, rope)
        self.options.append(options)
        self.inside[f"{name}.{self.family.expansion}"] = Attachment(expansion_forward, heads)
        forward = latent_forward if self.family.rotated else latent_forward_without_positions
        facts = LatentFacts(
            heads=heads,
            options=options,
            low_rank=attributes["q_lora_rank"] is not None,
            interleaved=self.family.is_interleaved(module, self.config.to_dict()),
        )
        return Attachment(forward, facts if self.family.indexer is None else self._sparse(name, module, facts))

    def _sparse(self, name: str, module: nn.Module, facts: LatentFacts) -> LatentFacts:
        """Plan the indexer of a layer; return what its attention has to know beside."""
        family = self.family.indexer
        if family is None:
            raise TypeError(f"{self.prefix} has no indexers")
        halves = self.family.index_in_halves(module)
        self._check_rotation(facts.interleaved, not halves)
        children = dict(module.named_children())
        if "indexer" in children:
            self.indexers.append(f"{name}.indexer")
        if family.shares and "skip_topk" not in vars(module):
            raise BindingError(
                f"{self.prefix}: the class of transformers {transformers.__version__} does not know layers that take "
                "what an earlier one chooses; 5.7 and later do"
            )
        if family.shares and vars(module)["skip_topk"]:
            if not any(self.indexed):
                raise BindingError(
                    f"{self.prefix}: {name} takes the tokens that an earlier layer chooses (indexer_types: 'shared'), "
                    "and no layer before it does; allowed: 'full' in the first layer"
                )
            self.indexed.append(None)
            if "indexer" in children:  # some versions have one that is never called
                parts = [part for part, _ in children["indexer"].named_modules() if part]
                self.inside |= dict.fromkeys([f"{name}.indexer", *(f"{name}.indexer.{part}" for part in parts)])
            return replace(facts, reads="earlier choice", returns_choice=True)
        indexer = children["indexer"]
        options = self._index_options(f"{name}.indexer", indexer, facts.options)
        self.indexed.append(options)
        index = IndexerFacts(options, facts.options.rope, not halves)
        self.inside[f"{name}.indexer"] = Attachment(indexer_forward, index)
        if type(indexer.get_submodule("weights_proj")) is nn.Linear:
            self.inside[f"{name}.indexer.weights_proj"] = Attachment(weights_forward)
        return replace(facts, reads="own choice", returns_choice=family.shares)

    def _index_options(self, name: str, indexer: nn.Module, attention: LatentOptions) -> IndexOptions:
        attributes = vars(indexer)
        heads, size, top_k = attributes["n_heads"], attributes["head_dim"], attributes["index_topk"]
        if min(heads, top_k) < 1 or size < attention.rope:
            raise BindingError(
                f"{self.prefix}: {name} has index_n_heads={heads}, index_head_dim={size}, index_topk={top_k}; allowed: "
                f"at least 1 head, {attention.rope} elements (qk_rope_head_dim, all of it rotated), and 1 token"
            )
        return IndexOptions(attention.layer + 1, heads, size, attributes["softmax_scale"], top_k)

    def _check_rotation(self, attention: bool, indexer: bool) -> None:
        """Check that the classes rotate as a folder's config says, which they do not look at."""
        config = self.config.to_dict()
        for key, found in (("rope_interleave", attention), ("indexer_rope_interleave", indexer)):
            if key in config and bool(config[key]) != found:
                kinds = {True: "elements that stand side by side", False: "halves"}
                raise BindingError(
                    f"{self.prefix}: {key}={config[key]} of the config asks for rotated {kinds[not found]}, and the "
                    f"class of transformers {transformers.__version__} rotates {kinds[found]}: it would compute "
                    "another model. Use a version of transformers whose class does what the config says"
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
