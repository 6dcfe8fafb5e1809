"""List what the CPU implements of `ops.dispatch.Operations` and `WholeCalls`, in Numba, LLVM and torch."""

from samebit.kernels.cpu.activation import activated_backward, activated_forward, gated_backward, gated_forward
from samebit.kernels.cpu.attention.operation import (
    attention_backward,
    attention_forward,
    attention_of_unrotated,
    segment_attention,
)
from samebit.kernels.cpu.attention.step_rows import lay_out
from samebit.kernels.cpu.conv import conv_backward, conv_forward
from samebit.kernels.cpu.delta.gates import gates
from samebit.kernels.cpu.delta.gradients import delta_rule_backward
from samebit.kernels.cpu.delta.layer import delta_call
from samebit.kernels.cpu.delta.operation import delta_rule
from samebit.kernels.cpu.experts.block import block_call
from samebit.kernels.cpu.experts.operation import experts_backward, experts_forward
from samebit.kernels.cpu.experts.routing import route_backward, route_forward
from samebit.kernels.cpu.latent.operation import gradients_of_heads, latent_backward, latent_forward, multiply_heads
from samebit.kernels.cpu.latent.selection import choose_keys
from samebit.kernels.cpu.layers.attention import attention_call
from samebit.kernels.cpu.layers.calls import run_layers
from samebit.kernels.cpu.layers.ends import end_calls
from samebit.kernels.cpu.layers.latent import latent_call
from samebit.kernels.cpu.layers.sparse import sparse_call
from samebit.kernels.cpu.linear import (
    add_gradient_of_inputs,
    gradient_of_inputs,
    gradient_of_weight,
    multiply,
    multiply_gated,
    multiply_part,
)
from samebit.kernels.cpu.logprobs import entropies, entropy_gradient, gather, gather_gradient, log_softmax
from samebit.kernels.cpu.low_rank import add_low_rank
from samebit.kernels.cpu.ngrams.chains import find_match
from samebit.kernels.cpu.norm.backward import gated_rms_norm_backward, layer_norm_backward, rms_norm_backward
from samebit.kernels.cpu.norm.forward import (
    add_rms_norm,
    gated_rms_norm_forward,
    layer_norm_forward,
    rms_norm_forward,
)
from samebit.kernels.cpu.rope import join_rotated, rotate
from samebit.kernels.cpu.sampling import draw, keep_likely, sample, uniforms
from samebit.kernels.cpu.ssd.operation import scan_backward, scan_forward

__all__ = [
    "activated_backward",
    "activated_forward",
    "add_gradient_of_inputs",
    "add_low_rank",
    "add_rms_norm",
    "attention_backward",
    "attention_call",
    "attention_forward",
    "attention_of_unrotated",
    "block_call",
    "choose_keys",
    "conv_backward",
    "conv_forward",
    "delta_call",
    "delta_rule",
    "delta_rule_backward",
    "draw",
    "end_calls",
    "entropies",
    "entropy_gradient",
    "experts_backward",
    "experts_forward",
    "find_match",
    "gated_backward",
    "gated_forward",
    "gated_rms_norm_backward",
    "gated_rms_norm_forward",
    "gates",
    "gather",
    "gather_gradient",
    "gradient_of_inputs",
    "gradient_of_weight",
    "gradients_of_heads",
    "join_rotated",
    "keep_likely",
    "latent_backward",
    "latent_call",
    "latent_forward",
    "lay_out",
    "layer_norm_backward",
    "layer_norm_forward",
    "log_softmax",
    "multiply",
    "multiply_gated",
    "multiply_heads",
    "multiply_part",
    "rms_norm_backward",
    "rms_norm_forward",
    "rotate",
    "route_backward",
    "route_forward",
    "run_layers",
    "sample",
    "scan_backward",
    "scan_forward",
    "segment_attention",
    "sparse_call",
    "uniforms",
]
