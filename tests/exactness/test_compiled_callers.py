"""What keeps bits is refused by name inside of a function that is compiled, and runs where that is switched off."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from samebit.kernels import token_logprobs

from .families import bound_model, token_ids

CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "token_logprobs": token_logprobs,
    "a bound model": lambda model, ids: model(input_ids=ids, use_cache=False).logits,
}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_a_compiled_caller_is_told(what: str) -> None:
    model, ids, call = bound_model("Qwen3"), torch.tensor(token_ids(9)), CALLS[what]
    with pytest.raises(ValueError, match=rf"{what} is called inside of a function that torch\.compile compiles"):
        torch.compile(lambda given: call(model, given).sum(), backend="eager")(ids)
    uncompiled = torch.compiler.disable(call)
    found = torch.compile(lambda given: uncompiled(model, given) * 1, backend="eager")(ids)
    assert torch.equal(found, call(model, ids))
