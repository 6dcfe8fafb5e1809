"""Find the adapter that a layer of Zamba2 has in a module that several layers share."""

from typing import Any

from torch import nn

from samebit.kernels.binding.families.family import BindingError


def adapter_of(prefix: str, config: Any, name: str, module: nn.Module, adapters: str) -> int:
    """Return the place of the adapter that a layer uses in a module which it shares; -1 where that has none.

    Args:
        prefix: of the family's class names.
        config: the model's.
        name: of the module, with the number of the layer.
        module: the shared one.
        adapters: names the module's list of them.

    Raises:
        BindingError: a layer without an adapter of its own.
    """
    if adapters not in dict(module.named_children()):
        return -1
    layer = next(int(part) for part in name.split(".") if part.isdigit())
    place: int = config.hybrid_layer_ids.index(layer)
    if isinstance(module.get_submodule(f"{adapters}.{place}"), nn.Identity):
        raise BindingError(
            f"{prefix}: layer {layer} has no adapter of its own (num_mem_blocks="
            f"{config.num_mem_blocks}, hybrid layers {config.hybrid_layer_ids}); Hugging Face can not "
            "run this layout either"
        )
    return place
