"""List what a GPU implements of `samebit.kernels.ops.dispatch.Operations`, in Triton."""

from samebit.kernels.triton.activation import activated_backward, activated_forward, gated_backward, gated_forward
from samebit.kernels.triton.attention import attention_forward, segment_attention
from samebit.kernels.triton.conv import conv_forward
from samebit.kernels.triton.delta.gates import gates
from samebit.kernels.triton.delta.rule import delta_rule
from samebit.kernels.triton.experts.operation import experts_backward, experts_forward
from samebit.kernels.triton.experts.routing import route_backward, route_forward
from samebit.kernels.triton.gradients.attention import attention_backward
from samebit.kernels.triton.gradients.conv import conv_backward
from samebit.kernels.triton.gradients.delta import delta_rule_backward
from samebit.kernels.triton.gradients.ssd import scan_backward
from samebit.kernels.triton.heads import attention_of_unrotated
from samebit.kernels.triton.latent.attention import latent_forward
from samebit.kernels.triton.latent.gradients import latent_backward
from samebit.kernels.triton.latent.heads import gradients_of_heads, multiply_heads
from samebit.kernels.triton.latent.selection import choose_keys
from samebit.kernels.triton.linear import (
    add_gradient_of_inputs,
    add_low_rank,
    gradient_of_inputs,
    gradient_of_weight,
    multiply,
    multiply_gated,
    multiply_part,
)
from samebit.kernels.triton.norm import (
    add_rms_norm,
    gated_rms_norm_backward,
    gated_rms_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from samebit.kernels.triton.rope import join_rotated, rotate
from samebit.kernels.triton.ssd import scan_forward
from samebit.kernels.triton.vocabulary.filters import keep_likely
from samebit.kernels.triton.vocabulary.logprobs import entropies, entropy_gradient, gather, gather_gradient, log_softmax
from samebit.kernels.triton.vocabulary.sampling import draw, uniforms

__all__ = [
    "activated_backward",
    "activated_forward",
    "add_gradient_of_inputs",
    "add_low_rank",
    "add_rms_norm",
    "attention_backward",
    "attention_forward",
    "attention_of_unrotated",
    "choose_keys",
    "conv_backward",
    "conv_forward",
    "delta_rule",
    "delta_rule_backward",
    "draw",
    "entropies",
    "entropy_gradient",
    "experts_backward",
    "experts_forward",
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
    "latent_forward",
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
    "scan_backward",
    "scan_forward",
    "segment_attention",
    "uniforms",
]
