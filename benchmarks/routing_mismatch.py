"""Count the tokens that get another expert when the same is computed in another way: by Hugging Face, and by samebit.

    python benchmarks/routing_mismatch.py [--json FILE] [--quick]

One model of routed experts, the same weights and the same tokens everywhere. The tokens are sampled by samebit's
worker, whose choice of experts is compared with that of samebit's training forward. README.md in this folder defines
each number.
"""

# isort: split
import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from samebit.benchmarks.rounds import results_file
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads import models
from samebit.kernels import bind, token_logprobs
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.experts.routes import RouteList, use_notes
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

Routes = npt.NDArray[np.int16]
"""``[sequences, tokens, layers, experts of a token]``"""

SHAPE: dict[str, Any] = models.EXPERTS | {"vocab_size": 2048, "num_hidden_layers": 8}


@dataclass(frozen=True)
class Sizes:
    """Sets the sequences that are compared, in tokens; ``micro_batch`` of them are in a training forward."""

    sequences: int = 32
    prompt: int = 128
    new: int = 64
    micro_batch: int = 4
    chunk: int = 48


@dataclass(frozen=True)
class Piece:
    """Is the part of all sequences that one forward computes; over a cache it goes on from the one before."""

    sequences: slice
    tokens: slice


@dataclass(frozen=True)
class Way:
    """Is one way of Hugging Face to compute the sequences. experts, attention: its implementations."""

    pieces: list[Piece]
    cached: bool = False
    attention: str = "sdpa"
    experts: str = "grouped_mm"


def ways(sizes: Sizes) -> dict[str, Way]:
    """Return the ways that are compared with the first one, a trainer's."""
    everything, end = slice(None), sizes.prompt + sizes.new
    batches = [
        Piece(slice(first, first + sizes.micro_batch), everything)
        for first in range(0, sizes.sequences, sizes.micro_batch)
    ]
    chunks = [Piece(everything, slice(start, start + sizes.chunk)) for start in range(0, end, sizes.chunk)]
    decodes = [Piece(everything, slice(place, place + 1)) for place in range(sizes.prompt, end)]
    return {
        "trainer": Way(batches),
        "eager_attention": Way(batches, attention="eager"),
        "eager_experts": Way(batches, experts="eager"),
        "one_batch": Way([Piece(everything, everything)]),
        "chunked_prefill": Way(chunks, cached=True),
        "decoded": Way([Piece(everything, slice(0, sizes.prompt)), *decodes], cached=True),
    }


def build(shape: dict[str, Any], dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    """Build the model; its weights in float32 are those in bfloat16."""
    return models.build_experts(shape, torch.bfloat16, max_tokens=1024).to(dtype)


@torch.no_grad()
def hugging_faces(model: Qwen3MoeForCausalLM, way: Way, ids: Tensor) -> Routes:
    """Return the experts that Hugging Face's routers choose for ``ids`` ``[sequences, tokens]``."""
    model.set_attn_implementation(way.attention)
    model.set_experts_implementation(way.experts)
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    found = np.zeros((*ids.shape, len(routers), model.config.num_experts_per_tok), np.int16)
    cache = DynamicCache(config=model.config) if way.cached else None
    for piece in way.pieces:
        part = found[piece.sequences, piece.tokens]
        hooks = [
            router.register_forward_hook(lambda _, given, out, at=part[:, :, layer]: _put(at, out[2]))
            for layer, router in enumerate(routers)
        ]
        model(input_ids=ids[piece.sequences, piece.tokens], past_key_values=cache, use_cache=way.cached)
        for hook in hooks:
            hook.remove()
    return found


def _put(at: Routes, ids: Tensor) -> None:
    at[:] = ids.numpy().reshape(at.shape)


def samebits(model: Qwen3MoeForCausalLM, sizes: Sizes) -> tuple[Tensor, Routes, Routes]:
    """Return sampled sequences, and their experts in the worker and in the training forward, without the last token.

    Prompts are cached and computed in chunks, and sequences of all lengths share each step.
    """
    model = bind(copy.deepcopy(model))
    layout = binding_of(model).route_layout
    if layout is None:
        raise ValueError("this model has no routed experts")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (sizes.sequences, sizes.prompt), generator=generator).tolist()
    params = SamplingParams(max_tokens=sizes.new, seed=0, return_routed_experts=True)
    config = RolloutConfig(max_num_seqs=sizes.sequences, max_num_batched_tokens=sizes.chunk + sizes.sequences)
    with RolloutWorker(model, config=config) as worker:
        worker.generate(prompts[: sizes.sequences // 2], SamplingParams(max_tokens=1, return_routed_experts=True))
        outputs = worker.generate(prompts, params)
    ids = torch.tensor([out.prompt_token_ids + out.samples[0].token_ids for out in outputs])
    reported = np.stack([out.samples[0].routed_experts for out in outputs])
    trained = [_trained(model, layout, part) for part in ids.split(sizes.micro_batch)]
    return ids, reported, np.concatenate(trained)[:, :-1]


def _trained(model: Qwen3MoeForCausalLM, layout: Any, ids: Tensor) -> Routes:
    notes = RouteList()
    with use_notes(notes):
        token_logprobs(model, ids)
    return notes.of_rows(layout).reshape(*ids.shape, layout.num_layers, layout.top_k)


def shares(name: str, one: Routes, other: Routes) -> dict[str, Spread]:
    """Return per mille of pairs of a token and an expert that the other lacks, and of tokens with such a pair."""
    lacking = (one[..., None] != other[..., None, :]).all(-1)
    return {
        f"{name}_pairs_per_mille": spread([1e3 * float(lacking.mean())]),
        f"{name}_tokens_per_mille": spread([1e3 * float(lacking.any((-1, -2)).mean())]),
    }


def measure(shape: dict[str, Any], sizes: Sizes) -> dict[str, Spread]:
    """Return the figures of both dtypes, and of one beside the other on the same tokens."""
    metrics: dict[str, Spread] = {}
    for name, dtype in models.DTYPES.items():
        model = build(shape, dtype)
        ids, reported, trained = samebits(model, sizes)
        compared = {kind: hugging_faces(model, way, ids) for kind, way in ways(sizes).items()}
        trainer = compared.pop("trainer")
        for kind, routes in compared.items():
            metrics |= shares(f"huggingface_{kind}_{name}", routes, trainer)
        metrics |= shares(f"samebit_rollout_and_trainer_{name}", reported, trained)
    wider = hugging_faces(build(shape, torch.float32), ways(sizes)["trainer"], ids)
    return metrics | shares("huggingface_float32_bf16", wider, trainer)


ROWS = {
    "huggingface_eager_attention": "Hugging Face: eager attention beside sdpa",
    "huggingface_eager_experts": "Hugging Face: a loop over experts beside grouped_mm",
    "huggingface_one_batch": "Hugging Face: a batch of all beside micro-batches",
    "huggingface_chunked_prefill": "Hugging Face: chunked prefill beside whole sequences",
    "huggingface_decoded": "Hugging Face: decoded token by token beside whole sequences",
    "huggingface_float32": "Hugging Face: float32 beside bfloat16",
    "samebit_rollout_and_trainer": "samebit: rollout (chunks, cache, decode) beside trainer",
}


def show(metrics: dict[str, Spread]) -> None:
    """Print a row for each comparison, a column for each dtype."""
    made = Table(
        "per mille that differ", *(f"{what}, {dtype}" for dtype in models.DTYPES for what in ("pairs", "tokens"))
    )
    for prefix, title in ROWS.items():
        names = [f"{prefix}_{dtype}_{what}_per_mille" for dtype in models.DTYPES for what in ("pairs", "tokens")]
        made.add_row(title, *(f"{metrics[name].value:.3g}" if name in metrics else "" for name in names))
    Console(width=120).print(made)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the sequences")
    args = parser.parse_args()
    sizes = Sizes(sequences=4, micro_batch=2) if args.quick else Sizes()
    metrics = measure(SHAPE, sizes)
    show(metrics)
    if args.json:
        results_file.write(args.json, results_file.describe(shape=SHAPE, sizes=vars(sizes)), metrics)


if __name__ == "__main__":
    main()
