"""One GRPO step of the trainer, on the module that the worker generates with."""

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.kernels import token_logprobs
from samebit.recipes.grpo_loss import grpo_loss
from samebit.recipes.metrics import Row
from samebit.recipes.mismatch import Mismatch
from samebit.recipes.settings import Settings
from samebit.recipes.tiny_model import pad_id
from samebit.recipes.trajectory import Batch, Trajectory, micro_batches
from samebit.rollout import RolloutWorker

RAMP = 5


class Learner:
    """Owns the optimizer. Every sampled token is compared with the rollout before a weight changes."""

    def __init__(
        self, policy: PreTrainedModel, worker: RolloutWorker, tokenizer: PreTrainedTokenizerFast, settings: Settings
    ) -> None:
        self.policy = policy
        self.worker = worker
        self.tokenizer = tokenizer
        self.settings = settings
        self.optimizer = torch.optim.AdamW(policy.parameters(), settings.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, step: int, rows: Sequence[Trajectory]) -> Row:
        """Compare, learn, update the weights; the step's metrics. Nothing is updated if a token differs."""
        mismatch = Mismatch()
        started = perf_counter()
        self._compare_only([row for row in rows if row.advantage == 0.0], mismatch)
        compared = perf_counter()
        loss = self._backward([row for row in rows if row.advantage != 0.0], mismatch)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.grad_norm)
        if not mismatch.differing:
            self._update(step)
        return {
            **mismatch.metrics(),
            "actor/loss": loss,
            "actor/grad_norm": grad_norm.item(),
            "actor/lr": self.optimizer.param_groups[0]["lr"],
            "perf/time_logprobs": compared - started,
            "perf/time_train": perf_counter() - compared,
        }

    def _compare_only(self, rows: Sequence[Trajectory], mismatch: Mismatch) -> None:
        """Rows whose group agrees have no gradient; their log-probabilities are compared all the same."""
        with torch.no_grad():
            for batch in self._batches(rows):
                mismatch.add(batch, self._logprobs(batch))

    def _backward(self, rows: Sequence[Trajectory], mismatch: Mismatch) -> float:
        tokens = sum(len(row.sampled_ids) for row in rows)
        total = 0.0
        for batch in self._batches(rows):
            logprobs = self._logprobs(batch)
            mismatch.add(batch, logprobs)
            loss = grpo_loss(
                logprobs, batch.rollout_logprobs, batch.advantages, batch.sampled, tokens, self.settings.clip
            )
            loss.backward()
            total += loss.item()
        return total

    def _update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * min(1.0, step / RAMP)
        with self.worker.weight_update():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _batches(self, rows: Sequence[Trajectory]) -> Iterator[Batch]:
        return micro_batches(rows, self.settings.micro_batch_tokens, pad_id(self.tokenizer))

    def _logprobs(self, batch: Batch) -> Tensor:
        return token_logprobs(
            self.policy,
            batch.input_ids,
            attention_mask=batch.attention_mask,
            temperature=self.settings.temperature,
        )
