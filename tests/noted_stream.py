"""Make a stream of weights that notes what was gathered of it, as all ranks of a trainer do together."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from samebit.weight_sync import TensorSpec, WeightStream


def noted_stream(tensors: Mapping[str, Tensor], gathered: list[str]) -> WeightStream:
    def each() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            gathered.append(name)
            yield name, tensor.detach()

    return WeightStream({name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}, each())
