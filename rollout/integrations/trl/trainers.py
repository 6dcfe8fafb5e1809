"""Define TRL's GRPO and RLOO trainers with samebit as generator and as the trainer's log-probabilities.

They are subclasses: what TRL does stays TRL's. Three of its methods are taken over, and the model's fused forward; what
a resumed training would lack is added to two more.

Invariants
----------
* Worker and trainer share one module; an optimizer step moves no bytes and clears the prefix cache.
* Every sampled token whose log-probability TRL computes under the weights that it was sampled under is compared with
  the worker's number, bit by bit (`agreement`).
* What is not exact is refused by name in the constructor.
* A resumed training goes on with the weights and the prompts of the run, in any epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trl
from torch import nn
from torch.utils.data import Sampler

from samebit.kernels.binding.binding import Binding, binding_of
from samebit.rollout.config import RolloutConfig
from samebit.rollout.integrations.trl.agreement import Agreement
from samebit.rollout.integrations.trl.fused_forward import give_scores, own_forward
from samebit.rollout.integrations.trl.refusals import check_arguments, check_model, check_processor
from samebit.rollout.integrations.trl.sampling import (
    as_tensors,
    sampled,
    sampling_params,
    token_ids_of,
    with_images,
)
from samebit.rollout.integrations.trl.updates import TellOfSteps, load_adapter_beside_others
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

_LOGPROBS = "samebit_logprobs"
_MASK = "samebit_mask"
_VERSIONS = "samebit_versions"
"""Name what travels with a batch to the loss: the worker's log-probabilities, which tokens have one, and the version of
the weights behind each row. TRL shuffles and splits them as it does its own tensors."""

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


class _SamebitRollouts(_Trainer):
    """Stands before a trainer of TRL that generates, computes log-probabilities and takes a step in one loop.

    Attributes:
        worker: the rollout worker, on the trainer's module.
        agreement: what was compared, and what differed.
    """

    worker: RolloutWorker
    agreement: Agreement

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *more: Any,
        rollout_config: RolloutConfig | None = None,
        **options: Any,
    ) -> None:
        """Build TRL's trainer, and a worker on its model.

        Args:
            model, reward_funcs, args, more, options: as TRL takes them.
            rollout_config: of the worker; None for samebit's defaults with `args.seed`.

        Raises:
            ValueError: options under which the bits would not agree, by name.
            BindingError: a model that can not be bound exactly, by name.
        """
        if args is not None:
            check_arguments(args)
        before = own_forward(model)
        super().__init__(model, reward_funcs, args, *more, **options)
        check_arguments(self.args)
        check_model(self, self.model)
        give_scores(self.model, before, self.temperature)
        if self.ref_model is not None:
            give_scores(self.accelerator.unwrap_model(self.ref_model), None, self.temperature)
        binding = binding_of(self.model)
        check_processor(self.processing_class, binding)
        self.agreement = Agreement()
        params = sampling_params(self.args, self.eos_token_ids, binding.vocab_size)
        self._params: SamplingParams = params.ruling_out(self._tokens_of_answers(binding))
        config = RolloutConfig(seed=self.args.seed) if rollout_config is None else rollout_config
        self.worker = RolloutWorker(
            self.model,
            config=_whole_batch(config, rollout_config, self.args),
            tokenizer=None if self._params.structured_outputs is None else self._tokenizer,  # else TRL decodes
        )
        self._computed: list[torch.Tensor] = []
        self._sampled: list[list[float]] = []
        self.add_callback(TellOfSteps(self.worker))

    def _tokens_of_answers(self, binding: Binding) -> set[int]:
        """Return the tokens that TRL takes for images wherever they stand behind a prompt."""
        return set()

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], list[list[Any]] | None, dict[str, Any]]:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        # TRL has None for a prompt without images beside others, which it gives to a processor that refuses it.
        return prompt_ids, None if images is None else [own or [] for own in images], as_tensors(fields)

    def _sample(self, prompts: list[GivenPrompt]) -> tuple[list[list[int]], list[list[float]]]:
        token_ids, logprobs = sampled(self.worker, prompts, self._params)
        self._sampled = logprobs
        return token_ids, logprobs

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, *given: Any, compute_entropy: bool = False, **options: Any
    ) -> Any:
        scoring = partial(model, with_entropy=compute_entropy)
        found = super()._get_per_token_logps_and_entropies(scoring, *given, compute_entropy=compute_entropy, **options)
        self._computed.append(found[0].detach())
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._computed.clear()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        logprobs, mask = self._rollout_logprobs(output)
        old = self._old_logprobs(output)
        if old is not None:
            self.agreement.add(logprobs, old, mask, training=self.model.training)
        versions = torch.full((len(mask),), self.worker.weight_version, device=mask.device)
        output |= {_LOGPROBS: logprobs, _MASK: mask, _VERSIONS: versions}
        return output

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self._computed.clear()
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        current = inputs[_VERSIONS] == self.worker.weight_version
        mask = inputs[_MASK] & current[:, None]
        self.agreement.add(inputs[_LOGPROBS], self._computed[0], mask, training=self.model.training)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs.update(self.agreement.take_metrics(training=self.model.training))
        super().log(logs, start_time)

    def _get_train_sampler(self, *given: Any, **options: Any) -> Sampler[int]:
        return _ByEpoch(super()._get_train_sampler(*given, **options))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *given: Any, **options: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *given, **options)
        load_adapter_beside_others(self.model, Path(resume_from_checkpoint))

    def _rollout_logprobs(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the worker's log-probabilities of a batch ``[B, C]``, and which tokens have one."""
        raise NotImplementedError

    def _old_logprobs(self, output: dict[str, Any]) -> torch.Tensor | None:
        """Return what the trainer computed ``[B, C]`` under the weights that the batch was sampled under, if it did."""
        raise NotImplementedError


class GRPOTrainer(_SamebitRollouts, trl.GRPOTrainer):
    """Trains as TRL's `GRPOTrainer`, with exact rollouts; takes the same arguments, and `rollout_config`."""

    def _tokens_of_answers(self, binding: Binding) -> set[int]:
        if binding.images is None or not (self._is_vlm and self.tools):
            return set()
        # What a tool says may hold images, so behind one TRL takes any placeholder for theirs. It samples none either.
        found = (binding.images.token_id, self._image_pad_token_id, self._video_pad_token_id)
        return {token for token in found if token is not None}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *_given: Any, **options: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        prompts = with_images(prompt_ids, images, multimodal_fields)
        if "has_tool_images" not in options:
            return self._sample(prompts)
        # TRL says so behind tools alone, and goes on without a turn that has no tokens.
        fits = [len(token_ids_of(prompt)) < self.worker.limits.max_model_len for prompt in prompts]
        found = zip(*self._sample(list(compress(prompts, fits))), strict=True)
        turns = [next(found) if one else ([], []) for one in fits]
        return [token_ids for token_ids, _ in turns], [logprobs for _, logprobs in turns]

    def _rollout_logprobs(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
        logprobs = output.get("sampling_per_token_logps")
        if logprobs is None:  # a `rollout_func` may have none
            return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device), torch.zeros_like(mask)
        return logprobs, mask

    def _old_logprobs(self, output: dict[str, Any]) -> torch.Tensor | None:
        return output.get("old_per_token_logps")


class RLOOTrainer(_SamebitRollouts, trl.RLOOTrainer):
    """Trains as TRL's `RLOOTrainer`, with exact rollouts; takes the same arguments, and `rollout_config`."""

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any]
    ) -> list[list[int]]:
        return self._sample(with_images(prompt_ids, images, multimodal_fields))[0]

    def _rollout_logprobs(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        mask = output["completion_mask"].bool()
        logprobs = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        for row, values in zip(logprobs, self._sampled, strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.float32)
        return logprobs, mask

    def _old_logprobs(self, output: dict[str, Any]) -> torch.Tensor | None:
        return self._computed[0]  # TRL computes the policy's before the reference model's


class _ByEpoch(Sampler[int]):
    """Gives each epoch the order that TRL's sampler gives it in an unbroken run.

    That sampler draws an order at each pass, and counts none: one that is made in the third epoch begins with the order
    of the first.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch of the next pass; accelerate calls this."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            generator = self._sampler.generator.manual_seed(self._sampler.seed)
            for _ in range(self._epoch):
                torch.randperm(self._sampler.num_samples, generator=generator)
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def _whole_batch(config: RolloutConfig, given: RolloutConfig | None, args: Any) -> RolloutConfig:
    """Return a config in which a generation batch runs at once, unless the caller has one."""
    if given is not None:
        return config
    at_once = min(max(args.generation_batch_size, config.max_num_seqs), config.max_num_batched_tokens)
    return replace(config, max_num_seqs=at_once)
