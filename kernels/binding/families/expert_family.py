"""Say what tells the blocks of routed experts of one family from those of another."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Router:
    """Names the router: in the block, and its classes; an empty class name stands for ``nn.Linear``.

    logits_last: it gives ids, weights and logits, where others give logits, weights and ids.
    handed: its block has the ``e_score_correction_bias``, and hands it to each call.
    statics: its module ``moe_statics`` has that, a parameter ``[1, E]`` without a gradient.
    within: the name of a module inside it that has its weight, in versions of transformers where it has one.
    least_sum: the config's key for the least that it divides by; empty for none.
    correction: the name of that bias.
    switch: the config's key for whether there is one; empty where there always is.
    scaled: weights have a factor, the config's ``routed_scaling_factor``, also without groups.
    floor: as in `layout.options.RoutingOptions`.
    """

    name: str = "gate"
    classes: tuple[str, ...] = ("TopKRouter",)
    logits_last: bool = False
    handed: bool = False
    statics: bool = False
    within: str = "layer"
    least_sum: str = ""
    correction: str = "e_score_correction_bias"
    switch: str = ""
    scaled: bool = False
    floor: float = 1e-20


@dataclass(frozen=True)
class SharedExperts:
    """Names the experts that compute every row, where a block has them, and their ``gate``: the projection to one
    number a row, whose sigmoid is their weight; empty for none."""

    name: str = "shared_experts"
    gate: str = ""


GATED_SHARED = SharedExperts("shared_expert", "shared_expert_gate")
"""Qwen's kind: one expert of every row, weighted by a sigmoid."""


@dataclass(frozen=True)
class ExpertFamily:
    """Describes one family's blocks of experts.

    Class names are given by what follows the family's prefix, names over the versions of transformers as tuples.

    Attributes:
        block: class name of the module that holds router and experts.
        scores: as in `layout.options.RoutingOptions`; routers of sigmoids, or their blocks, have an
            ``e_score_correction_bias``, those of a softmax where `Router` says so.
        experts: class names of the module that holds the experts' weights; ``ParallelExperts`` are two of them.
        router: its names.
        normalised: the config's key for whether weights are divided by their sum; empty where they are not, True where
            they always are.
        group_score: what groups of experts are compared by, in families whose configs have groups (``n_group``,
            ``topk_group``) and a factor on the weights (``routed_scaling_factor``).
        method: the config's key for whether there are groups at all; empty where there always are.
        form: of the experts, as in `layout.options.ExpertOptions`.
        transposed: the experts' weights have inputs before outputs.
        biased: router and experts have biases.
        returns_weights: the block's result is a pair, with the weights of the chosen.
        shared: the names of the experts that compute every row.
    """

    block: str
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"]
    experts: tuple[str, ...] = ("Experts",)
    router: Router = Router()
    normalised: str | Literal[True] = ""
    group_score: Literal["none", "best", "best_two"] = "none"
    method: str = ""
    form: Literal["gated", "plain", "interleaved"] = "gated"
    transposed: bool = False
    biased: bool = False
    returns_weights: bool = False
    shared: SharedExperts = SharedExperts()


SIGMOID = ExpertFamily(
    "MoE",
    "sigmoid",
    experts=("NaiveMoe", "Experts"),
    router=Router(classes=("TopkRouter",)),
    normalised="norm_topk_prob",
    group_score="best_two",
)
"""DeepSeek-V3's kind: scores are sigmoids, experts are chosen in groups and with a correction."""

SOFTMAX = ExpertFamily("SparseMoeBlock", "softmax", normalised="norm_topk_prob")
"""Qwen3-MoE's kind: a softmax over all experts, of which the config may have the chosen ones' divided by their sum."""

SOFTMAX_OF_CHOSEN = ExpertFamily("SparseMoeBlock", "softmax_of_chosen")
"""Mixtral's kind: a softmax over the chosen experts."""
