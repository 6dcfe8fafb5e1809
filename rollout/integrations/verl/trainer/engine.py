"""Give verl's FSDP engine samebit's forward and log-probabilities.

It is in use where `model.fused_kernel_options.impl_backend` is "samebit"; verl then leaves the model's class alone and
reads `log_probs` and `entropy` from the model's output. On a CPU the class also serves other models, since verl has no
engine for that device.

Invariants
----------
* With `model.lora_rank` A and B stay apart from the weights, in the forward and on their way to the servers (`lora`).
* Trainer and rollout worker bind the same model the same way; what would change its arithmetic is refused by name
  (`exactness`).
* The old log-probabilities of a model with routed experts come with a comparison of its choice of experts with the
  rollout's (`routing`), where the servers report that.
* Autocast is off: parameters and inputs are in the dtype that FSDP2's mixed precision asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.experts.routes import RouteList, use_notes
from samebit.kernels.binding.lora.peft_model import configs_of
from samebit.rollout.adapters.registry import FIRST
from samebit.rollout.integrations.verl.names import IMAGES
from samebit.rollout.integrations.verl.trainer.exactness import check_class, check_exact
from samebit.rollout.integrations.verl.trainer.fused_forward import give_logprobs
from samebit.rollout.integrations.verl.trainer.images import with_images
from samebit.rollout.integrations.verl.trainer.lora import adapter_stream, base_stream, bind_adapted
from samebit.rollout.integrations.verl.trainer.routing import compared_routes
from samebit.rollout.integrations.verl.value_heads import ignore_trl_without_them
from samebit.weight_sync import WeightStream

BACKEND = "samebit"
STRATEGIES = ("fsdp", "fsdp2")


class SamebitEngine(FSDPEngineWithLMHead):
    """Trains the actor and computes the reference policy."""

    _autocast_dtype: torch.dtype

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.exact = is_asked_for(model_config)
        self._images = self.exact and bool(model_config.fused_kernel_options.get(IMAGES))
        if self.exact:
            check_exact(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self) -> nn.Module:
        ignore_trl_without_them()
        if self.exact:
            # The bound model has an attention of its own, and flash-attention, verl's default, may not be there.
            self.model_config.hf_config._attn_implementation = "sdpa"
        module: nn.Module = super()._build_module()
        if not self.exact:
            return module
        check_class(module)
        return module if self._is_lora else give_logprobs(bind(module))

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        adapted: nn.Module = super()._build_lora_module(module)
        return bind_adapted(adapted) if self.exact else adapted

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        with _without_pinned_memory(self.engine_config):
            sharded: nn.Module = super()._build_fsdp_module(module)
        if self.exact:
            self._computes_in: torch.dtype = self._autocast_dtype
            self._autocast_dtype = torch.float32  # for verl this means: no autocast
        return sharded

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.exact:
            if self._images:
                inputs = with_images(inputs, get_device_name())
            wanted = tensordict_utils.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False)
            inputs["with_entropy"] = bool(wanted)
        return inputs, output_args

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[Any, dict[str, Any]]:
        reported = micro_batch.get("routed_experts", None)
        layout = binding_of(self.module).route_layout if self.exact else None
        if reported is None or layout is None or not forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[no-any-return]
        notes = RouteList()
        with use_notes(notes):
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        counted = compared_routes(reported, micro_batch["input_ids"], notes.of_rows(layout), layout)
        output["model_output"].update(counted)
        return loss, output

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = True, **options: Any
    ) -> tuple[Any, Any]:
        """Return for the rollout a `WeightStream` in the dtype of the forward, gathered tensor by tensor: of the whole
        model; or of the adapter, or once of what it is for, and the adapter's config."""
        if not self.exact:
            options = {"layered_summon": layered_summon, "base_sync_done": base_sync_done, **options}
            return super().get_per_tensor_param(**options)  # type: ignore[no-any-return]
        if self._is_offload_param and get_device_name() == "cuda":
            load_fsdp_model_to_gpu(self.module)  # shards are gathered there; verl takes them away again
        if not self._is_lora:
            return WeightStream.of(self.module, dtype=self._computes_in, images=self._images), None
        stream = adapter_stream if base_sync_done else base_stream
        return stream(self.module, self._computes_in), configs_of(self.module)[FIRST].to_dict()


def register() -> None:
    """Register the engine in verl for FSDP models: on a CPU, and on NVIDIA GPUs in place of verl's own, as which it
    behaves where samebit is not asked for."""
    if SamebitEngine not in EngineRegistry._engines["language_model"]["fsdp2"].values():
        as_engine = EngineRegistry.register
        as_engine("language_model", list(STRATEGIES), device="cpu")(SamebitEngine)
        as_engine("language_model", list(STRATEGIES), device="cuda", vendor="nvidia")(SamebitEngine)


def is_asked_for(model_config: Any) -> bool:
    """Tell whether the model's log-probabilities shall be samebit's."""
    options = model_config.fused_kernel_options or {}
    return options.get("impl_backend") == BACKEND


@contextmanager
def _without_pinned_memory(engine_config: Any) -> Iterator[None]:
    """Wrap a reference policy like an actor: verl offloads it to pinned memory, which needs an accelerator."""
    forward_only = engine_config.forward_only
    engine_config.forward_only = forward_only and get_device_name() != "cpu"
    try:
        yield
    finally:
        engine_config.forward_only = forward_only
