"""Define the forwards that `bind` gives to a causal language model and to its head.

Invariants:

* Without a `Scoring` the class's own forward runs. With one, the decoder runs as in that forward, and the head gives
  log-probabilities of the rows that reach it (`logprob_head`): inside the head's own call, because that is where FSDP2
  has its weight in one piece, and as its output and the model's, because FSDP2 prepares the backward of those.
* In a step of a rollout likewise, without what transformers makes around the two (of a small model a fiftieth of it),
  unless a hook on the model is to see that; on a CPU all of it is one call where nobody listens (`layers.step`).
* The epilogue of the class's forward is then the family's (`epilogue`). Where it may be another one, or something
  stands between the head and its logits, all logits are made by the class's own forward and scored afterwards.
* Layout and scoring that are installed are of one model. Another one that is called meanwhile, in a hook, is refused:
  it would write to that one's cache.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from samebit.kernels.binding.epilogue import Epilogue
from samebit.kernels.binding.layers.step import logits_in_one_call
from samebit.kernels.binding.modules import ids_of_call, refuse_packed
from samebit.kernels.binding.trainer.logprob_head import scored
from samebit.kernels.binding.trainer.logprob_request import Scores, Scoring, installed_scoring, use_scoring
from samebit.kernels.layout.forward_context import installed_context, training_context, use_context
from samebit.kernels.ops.linear import is_hooked, linear
from samebit.kernels.ops.logprobs import entropy_from_logits, logprobs_from_logits

Forward = Callable[..., Any]


def _named_as(own: Forward) -> Callable[[Forward], Forward]:
    """Return a decorator that gives a forward the name and signature of another one, but no way to it: Accelerate's
    `unwrap_model` takes off every forward that shows what it wraps."""

    def named(forward: Forward) -> Forward:
        functools.update_wrapper(forward, own)
        vars(forward).pop("__wrapped__")
        vars(forward)["__signature__"] = inspect.signature(own)
        return forward

    return named


@dataclass(frozen=True, eq=False)
class StepOutput:
    """Holds the logits ``[K, V]`` of a step's rows that reach the head: what a rollout reads of a model's output.

    To take them out of a batch of one, behind all layers, took 55 us.
    """

    rows: torch.Tensor

    @property
    def logits(self) -> torch.Tensor:
        """Return them as the class's own output has them."""
        return self.rows[None]


@dataclass(frozen=True)
class HeadFacts:
    """Holds the epilogue of the model that the head is of, and the model's config."""

    epilogue: Epilogue
    config: Any


def head_forward(self: Any, x: torch.Tensor) -> torch.Tensor | Scores:
    """Compute a language model's logits in float32, or the scores that were asked for instead."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device)
    if not (casts or x.is_cuda):
        return _of_head(self, x)
    with ExitStack() as stack:
        if x.is_cuda:
            stack.enter_context(torch.cuda.device_of(x))
        if casts:
            stack.enter_context(torch.autocast(device, enabled=False))
        return _of_head(self, x)


def _of_head(head: Any, x: torch.Tensor) -> torch.Tensor | Scores:
    scoring, facts = installed_scoring(), head.samebit
    if scoring is None:
        return linear(x, head.weight, head.bias).float()
    x = x.to(head.weight.dtype)  # Mamba2's are float32, and its class rounds them before the head
    return scored(x, head.weight, head.bias, facts.epilogue, facts.config, scoring)


def own_forward(model: nn.Module) -> Forward:
    """Return what a call of the model runs, as a function of the model: its class's forward, or what replaced it."""
    replaced = model.__dict__.get("forward")
    if replaced is None:
        return type(model).forward
    if isinstance(replaced, MethodType) and replaced.__self__ is model:
        return replaced.__func__

    @_named_as(replaced)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not model:
            raise ValueError(
                f"this copy of a bound {type(model).__name__} would run the model that it was copied from: that one's "
                "forward was replaced by a function that knows no other model. Allowed: a method of the model "
                "(types.MethodType(function, model)), or bind on a copy without it (del model.forward)"
            )
        return replaced(*args, **kwargs)

    return forward


def causal_forward(own: Forward, *, known: bool) -> Forward:
    """Return the forward of a causal language model whose class has the forward ``own``.

    Args:
        own: takes the model first.
        known: its head is bound, and its epilogue is the family's.
    """

    @_named_as(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        scoring = installed_scoring()
        with _computing(self, scoring):
            return computed(self, scoring, *args, **kwargs)

    def computed(self: Any, scoring: Scoring | None, /, *args: Any, **kwargs: Any) -> Any:
        if scoring is None:
            alone = known and not args and _in_step(kwargs) and _is_bound_alone(self.lm_head) and not is_hooked(self)
            return _step_logits(self, **kwargs) if alone else own(self, *args, **kwargs)
        _refuse_router_losses(self.config.get_text_config(), kwargs)
        if known and _is_bound_alone(self.lm_head):
            return _scores(self, *args, **kwargs)
        return _scores_of_logits(own, scoring, self, *args, **kwargs)

    return forward


_inside: ContextVar[tuple[nn.Module, Scoring | None] | None] = ContextVar("samebit_computing", default=None)


@contextmanager
def _computing(model: nn.Module, scoring: Scoring | None) -> Iterator[None]:
    """Note which model computes, and what it scores.

    Raises:
        ValueError: it is called inside of another one's forward, and would take its layout and scoring for its own.
    """
    outer, outer_scoring = _inside.get() or (model, scoring)
    own = scoring is not None and scoring is not outer_scoring  # `token_logprobs` installs one with a layout
    installed = scoring is not None or installed_context() is not None
    if outer is not model and installed and not own:
        raise ValueError(
            f"this {type(model).__name__} is called inside the forward of another bound model, by a hook perhaps, "
            "and would compute in that one's layout. Allowed there: samebit.kernels.token_logprobs(model, "
            "input_ids); or call it before or after"
        )
    token = _inside.set((model, scoring))
    try:
        yield
    finally:
        _inside.reset(token)


def keeping_positions(own: Forward) -> Forward:
    """Wrap the forward ``own`` of a class that drops ``position_ids`` on the way to its decoder (Mamba2)."""

    @_named_as(own)
    def forward(self: Any, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if installed_context() is not None:
            return own(self, *args, **kwargs)
        if position_ids is None:
            refuse_packed(kwargs)
            return own(self, *args, **kwargs)
        ids = ids_of_call(args, kwargs)
        layout = training_context(tuple(ids.shape), kwargs.get("attention_mask"), position_ids, ids.device)
        with use_context(layout):
            return own(self, *args, **kwargs)

    return forward


def _refuse_router_losses(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise where the class's forward adds a loss of its routers, which no log-probability holds."""
    asked = kwargs.get("output_router_logits")
    if asked or (asked is None and vars(config).get("output_router_logits")):
        raise ValueError(
            "output_router_logits=True: log-probabilities come without the loss that balances the experts. Set "
            "model.config.output_router_logits = False, and compute that loss by a forward of its own"
        )


def _in_step(kwargs: dict[str, Any]) -> bool:
    """Return whether a call is that of a rollout's step, and asks for nothing else."""
    context = installed_context()
    rollout = context is not None and context.pages is not None and not torch.is_grad_enabled()
    kept = kwargs.get("logits_to_keep")
    some = isinstance(kept, torch.Tensor) or kept == 0
    if not (rollout and some and kwargs.keys() == {"input_ids", "logits_to_keep"}):
        return False
    ids = kwargs["input_ids"]
    return isinstance(ids, torch.Tensor) and ids.shape[:-1] == (1,)


def _step_logits(self: Any, input_ids: torch.Tensor, logits_to_keep: torch.Tensor | int) -> StepOutput:
    """Return the logits of the rows that are kept, 0 for all."""
    head, kept = self.lm_head, logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else None
    logits = logits_in_one_call(self, input_ids, kept)
    if logits is None:
        hidden = self.base_model(input_ids=input_ids)[0]
        hidden = hidden if kept is None else hidden.index_select(1, kept)
        logits = head(hidden.to(head.weight.dtype))[0]
    facts: HeadFacts = head.samebit
    return StepOutput(facts.epilogue(facts.config, logits))


def _is_bound_alone(head: nn.Module) -> bool:
    """Return whether a call of the head gives what `head_forward` gives: it is not wrapped, and only FSDP2 hooks it."""
    forward = head.__dict__.get("forward")
    hooks = len(head._forward_hooks) - isinstance(head, FSDPModule)
    return isinstance(forward, MethodType) and forward.__func__ is head_forward and hooks == 0


def _scores(
    self: Any, *args: Any, logits_to_keep: int | torch.Tensor = 0, return_dict: bool | None = None, **kwargs: Any
) -> Scores:
    rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    hidden = self.base_model(*args, **kwargs)[0]
    scores: Scores = self.lm_head(hidden[:, rows])
    return scores


def _scores_of_logits(own: Forward, scoring: Scoring, *args: Any, **kwargs: Any) -> Scores:
    with use_scoring(None):
        logits = own(*args, **kwargs).logits
    logits = logits.reshape(*scoring.token_ids.shape, logits.shape[-1])
    # Copies, since these may be views.
    return Scores(
        log_probs=logprobs_from_logits(logits, scoring.token_ids, scoring.temperatures).clone(),
        entropy=entropy_from_logits(logits, scoring.temperatures).clone() if scoring.with_entropy else None,
    )
