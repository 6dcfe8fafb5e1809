"""Replace a GPU's operations where there is no GPU: each checks that its operands lie on one device, and computes
nothing.
"""

from typing import Any

import torch

Tensor = torch.Tensor


def on_one_device(*given: Any) -> None:
    devices = {part.device for part in given if isinstance(part, Tensor)}
    assert len(devices) == 1, f"one kernel is given tensors on {devices}"


def like(*tensors: Tensor) -> tuple[Tensor, ...]:
    on_one_device(*tensors)
    return tuple(torch.empty_like(tensor) for tensor in tensors)


def room(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def rows_of(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(room(x, len(x), dtype=torch.float32) for _ in range(count))


class NoKernels:
    """Implements `samebit.kernels.ops.dispatch.Operations`."""

    def multiply(self, x: Tensor, layers: Any) -> list[Tensor]:
        on_one_device(x, *(part for layer in layers for part in layer))
        return [room(x, *x.shape[:-1], len(weight)) for weight, _ in layers]

    def multiply_part(self, x: Tensor, part: Any, outputs: int) -> Tensor:
        return self.multiply(x, (part,))[0]

    def multiply_gated(self, activation: str, x: Tensor, layers: Any, *, kept: bool) -> Any:
        gate, up = self.multiply(x, layers)
        return torch.empty_like(gate), (gate, up) if kept else ()

    def add_low_rank(self, bases: Any, x: Tensor, terms: Any) -> list[Tensor]:
        return list(like(*bases, x, *(matrix for term in terms.each for matrix in term[:2]))[: len(bases)])

    def gradient_of_inputs(self, grad: Tensor, weight: Tensor) -> Tensor:
        on_one_device(grad, weight)
        return room(weight, *grad.shape[:-1], weight.shape[1])

    def gradient_of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        on_one_device(grad, x)
        return room(x, grad.shape[1], x.shape[1])

    def add_gradient_of_inputs(self, sums: Tensor, grad: Tensor, weight: Tensor) -> None:
        on_one_device(sums, grad, weight)

    def rms_norm_forward(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
        return like(x, weight)[0], (x, weight)

    def add_rms_norm(self, x: Tensor, y: Tensor, total: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
        return like(x, y, total, weight)[0], (total, weight)

    def layer_norm_forward(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        return like(x, weight, bias)[0], (x, weight, bias)

    def gated_rms_norm_forward(self, x: Tensor, gate: Tensor, weight: Tensor, options: Any) -> Any:
        return like(x, gate, weight)[0], (x, gate, weight)

    def gated_forward(self, activation: str, gate: Tensor, up: Tensor) -> Any:
        return like(gate, up)[0], (gate, up)

    def gated_backward(self, activation: str, saved: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return like(*saved, grad)[:-1]

    def activated_forward(self, activation: str, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def activated_backward(self, activation: str, x: Tensor, grad: Tensor) -> Tensor:
        return like(x, grad)[0]

    def of_saved(self, saved: Any, grad: Tensor, *options: Any) -> tuple[Tensor, ...]:
        return like(*saved, grad)[:-1]

    rms_norm_backward = layer_norm_backward = gated_rms_norm_backward = of_saved
    conv_backward = scan_backward = delta_rule_backward = of_saved

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        return like(x, cos, sin)[0]

    def join_rotated(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        on_one_device(x, y, cos, sin)
        return torch.cat([x, y], dim=-1)

    def attention_forward(self, q: Tensor, k: Tensor, v: Tensor, context: Any, options: Any, sinks: Any) -> Any:
        on_one_device(q, k, v, sinks)
        return torch.empty_like(q), (q, k, v) if sinks is None else (q, k, v, sinks)

    def attention_of_unrotated(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Any, context: Any, options: Any, sinks: Any, norms: Any
    ) -> Any:
        of_norms: Any = ((), ()) if norms is None else ((q, norms.queries), (k, norms.keys))
        on_one_device(q, *angles, *(part for pair in of_norms for part in pair))
        out, saved = self.attention_forward(q, k, v, context, options, sinks)
        return out, (saved, *of_norms)

    def attention_backward(self, saved: Any, grad: Tensor, context: Any, options: Any) -> tuple[Tensor | None, ...]:
        q, k, v, *sinks = like(*saved, grad)[:-1]
        return q, k, v, sinks[0] if sinks else None

    def segment_attention(self, q: Tensor, k: Tensor, v: Tensor, segments: Any, scale: float) -> Tensor:
        return like(q, k, v)[0]

    def latent_forward(self, q: Tensor, latents: Tensor, context: Any, options: Any, chosen: Any) -> Any:
        on_one_device(q, latents, chosen)
        return room(q, *q.shape[:2], options.rank), (q, latents)

    def latent_backward(self, saved: Any, grad: Tensor, context: Any, options: Any) -> tuple[Tensor, ...]:
        return like(*saved, grad)[:-1]

    def choose_keys(self, queries: Tensor, keys: Tensor, weights: Tensor, context: Any, options: Any) -> Tensor:
        on_one_device(queries, keys, weights)
        return room(queries, len(queries), options.top_k, dtype=torch.int32)

    def multiply_heads(self, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        on_one_device(x, weight)
        return room(x, *x.shape[:2], weight.shape[2 if transposed else 1])

    def gradients_of_heads(self, x: Tensor, weight: Tensor, grad: Tensor, transposed: bool, needed: Any) -> Any:
        return tuple(part if asked else None for part, asked in zip(like(x, weight, grad), needed, strict=False))

    def conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor, context: Any, layer: int, silu: bool) -> Any:
        return like(x, weight, bias)[0], (x, weight, bias)

    def scan_forward(self, xbc: Tensor, *others: Any) -> Any:
        *parameters, _, options = others
        on_one_device(xbc, *parameters)
        return room(xbc, len(xbc), xbc.shape[1] - 2 * options.groups * options.state_size), (xbc, *parameters)

    def delta_rule(self, qkv: Tensor, decay: Tensor, beta: Tensor, context: Any, options: Any) -> Tensor:
        on_one_device(qkv, decay, beta)
        return room(qkv, len(qkv), options.inner)

    def gates(self, a: Tensor, b: Tensor, a_log: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        on_one_device(a, b, a_log, bias)
        return room(a, *a.shape, dtype=torch.float32), room(b, *b.shape, dtype=torch.float32)

    def route_forward(self, logits: Tensor, correction: Any, options: Any) -> Any:
        on_one_device(logits, correction)
        ids, weights = (room(logits, len(logits), options.top_k, dtype=of) for of in (torch.int32, torch.float32))
        return ids, weights, (logits, ids, weights)

    def route_backward(self, saved: Any, grad: Tensor, options: Any) -> Tensor:
        return like(*saved, grad)[0]

    def experts_forward(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any, options: Any, saving: bool) -> Any:
        parts = experts.up, experts.down, experts.up_bias, experts.down_bias
        on_one_device(x, ids, weights, *parts)
        return torch.empty_like(x), (x, weights, *(x.new_empty(0) if part is None else part for part in parts))

    def experts_backward(self, saved: Any, grad: Tensor, options: Any, needed: Any) -> tuple[Tensor | None, ...]:
        return tuple(part if asked else None for part, asked in zip(like(*saved, grad), needed, strict=False))

    def gather(self, logits: Tensor, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
        on_one_device(logits, tokens, temperatures)
        return rows_of(logits, 3)

    def gather_gradient(self, logits: Tensor, *of_rows: Tensor) -> Tensor:
        return like(logits, *of_rows)[0]

    def entropies(self, logits: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
        on_one_device(logits, temperatures)
        return rows_of(logits, 3)

    entropy_gradient = gather_gradient
