"""Take one GRPO step of the trainer, on samples of its own weights or of those one update ago.

Invariant: all tokens of a step are compared with the rollout before its first update.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.kernels import token_logprobs
from samebit.recipes.grpo_loss import grpo_loss, truncated_loss
from samebit.recipes.importance import Importance
from samebit.recipes.metrics import Row
from samebit.recipes.mismatch import Mismatch, MismatchError
from samebit.recipes.previous import PreviousPolicy
from samebit.recipes.settings import Settings
from samebit.recipes.sync import Update
from samebit.recipes.tiny_model import pad_id
from samebit.recipes.trajectory import Batch, Trajectory, longest_first, micro_batches

RAMP = 5


class Timed:
    """Calls an action, and keeps the seconds that it took."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self.seconds = 0.0

    def __call__(self) -> None:
        started = perf_counter()
        self._action()
        self.seconds += perf_counter() - started


class Learner:
    """Owns the optimizer. Every sampled token is compared with the rollout before a weight changes.

    previous: needed where a batch may hold tokens that were sampled before the last update. exact: update nothing where
    a token differs; False for who studies what differences do. Such a learner takes all log-probabilities in a pass of
    their own before it learns, as trainers do whose engine's are not theirs. updates: optimizer steps of a step, each
    on a share of its prompts. All but the first learn from samples of weights that have changed since.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        update: Update,
        tokenizer: PreTrainedTokenizerFast,
        settings: Settings,
        previous: PreviousPolicy | None = None,
        *,
        exact: bool = True,
        updates: int = 1,
    ) -> None:
        self.policy = policy
        self.version = 0
        self.settings = settings
        self.optimizer = torch.optim.AdamW(policy.parameters(), settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._bring_worker_along = update
        self._pad_id = pad_id(tokenizer)
        self._previous = previous
        self.exact = exact
        self._updates = updates

    def step(self, step: int, rows: Sequence[Trajectory]) -> Row:
        """Compare, learn and update the weights; return the step's metrics."""
        mismatch, importance = Mismatch(), Importance()
        version = self.version
        first, *later = parts = shares(rows, self._updates)
        ages = [version + place - under for place, part in enumerate(parts) for row in part for under in row.versions]
        started = perf_counter()
        self._compare_only([row for row in first if row.advantage == 0.0 or not self.exact], mismatch)
        later = [self._compare_only(share, mismatch) for share in later]
        compared = perf_counter()
        learned = [self._learn(step, first, mismatch, importance, later=False)]
        if not (self.exact and mismatch.differing):
            learned += [self._learn(step, share, mismatch, importance, later=True) for share in later]
        ended = perf_counter()
        return {
            "weight_version": version,
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": max(ages),
            **mismatch.metrics(),
            "actor/lr": self.optimizer.param_groups[0]["lr"],
            **importance.metrics(),
            **_of_all(learned),
            "perf/time_logprobs": compared - started,
            "perf/time_train": ended - compared,
        }

    def _learn(
        self, step: int, rows: Sequence[Trajectory], mismatch: Mismatch, importance: Importance, *, later: bool
    ) -> Row:
        """Take an optimizer step, unless a token differs that must not; return its metrics.

        later: than others of the same samples, so that the rows have been compared, with weights that have moved since.
        """
        moving = [row for row in rows if row.advantage != 0.0]
        loss = self._backward(moving, mismatch, importance, later)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.grad_norm)
        learned = perf_counter()
        synced = {} if self.exact and mismatch.differing else self._update(step)
        return {
            "actor/loss": loss,
            "actor/grad_norm": grad_norm.item(),
            **synced,
            "perf/time_update": perf_counter() - learned,
        }

    def _compare_only(self, rows: Sequence[Trajectory], mismatch: Mismatch) -> list[Trajectory]:
        """Compare rows without learning from them; return them with the log-probabilities that are the old ones.

        Those of groups that agree have no gradient, but their log-probabilities must be equal too.
        """
        ordered = longest_first(rows)
        compared: list[Trajectory] = []
        with torch.no_grad():
            for batch in self._batches(ordered):
                logprobs = self._logprobs(batch)
                self._compare(batch, logprobs, mismatch)
                for found, sampled in zip(logprobs, batch.sampled, strict=True):
                    compared.append(replace(ordered[len(compared)], rollout_logprobs=found[sampled].tolist()))
        return compared if self.settings.correction == "none" else ordered

    def _backward(self, rows: Sequence[Trajectory], mismatch: Mismatch, importance: Importance, later: bool) -> float:
        tokens = sum(len(row.sampled_ids) for row in rows)
        total = 0.0
        for batch in self._batches(rows):
            logprobs = self._logprobs(batch)
            if self.exact and not later:
                self._compare(batch, logprobs, mismatch)
            importance.add(batch, logprobs, **self._cuts(later))
            loss = self._loss(batch, logprobs, tokens, later)
            loss.backward()
            total += loss.item()
        return total

    def _loss(self, batch: Batch, logprobs: Tensor, tokens: int, later: bool) -> Tensor:
        settings = self.settings
        if settings.correction == "truncate":
            return truncated_loss(
                logprobs, batch.rollout_logprobs, batch.advantages, batch.sampled, tokens, settings.truncation
            )
        now = settings.correction == "none" and not later
        sampled_with = logprobs.detach() if now else batch.rollout_logprobs
        return grpo_loss(logprobs, sampled_with, batch.advantages, batch.sampled, tokens, settings.clip)

    def _cuts(self, later: bool) -> dict[str, float]:
        """Return where the loss cuts ratios, in the words of `Importance.add`."""
        settings = self.settings
        if settings.correction == "truncate":
            return {"most": settings.truncation}
        return {} if settings.correction == "none" and not later else {"clip": settings.clip}

    def _compare(self, batch: Batch, logprobs: Tensor, mismatch: Mismatch) -> None:
        """Compare each token with the trainer's number under the weights that it was sampled under."""
        for version in batch.versions[batch.sampled].unique().tolist():
            if version == self.version:
                mismatch.add(batch, logprobs, version)
            elif self._previous is not None:
                mismatch.add(batch, self._previous.logprobs(batch, version, self.settings.temperature), version)
            else:
                raise MismatchError(f"a token was sampled under version {version}, the trainer has {self.version}")

    def _update(self, step: int) -> Row:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * min(1.0, step / RAMP)
        if self._previous is not None:
            self._previous.keep(self.policy, self.version)
        change = Timed(self.optimizer.step)
        started = perf_counter()
        report = self._bring_worker_along(change)
        seconds = perf_counter() - started - change.seconds
        self.version = report.version
        self.optimizer.zero_grad()
        known = {} if report.changed_tensors is None else {"sync/changed_tensors": report.changed_tensors}
        return {**known, "sync/sent_bytes": report.sent_bytes, "perf/time_sync": seconds}

    def _batches(self, rows: Sequence[Trajectory]) -> Iterator[Batch]:
        for batch in micro_batches(rows, self.settings.micro_batch_tokens, self._pad_id):
            yield batch.on(self.policy.device)

    def _logprobs(self, batch: Batch) -> Tensor:
        return token_logprobs(
            self.policy,
            batch.input_ids,
            attention_mask=batch.attention_mask,
            temperature=self.settings.temperature,
        )


def shares(rows: Sequence[Trajectory], count: int) -> list[Sequence[Trajectory]]:
    """Cut the rows of a step into this count of even shares, in their order."""
    cuts = [len(rows) * at // count for at in range(count + 1)]
    return [rows[begin:end] for begin, end in pairwise(cuts)]


def _of_all(learned: Sequence[Row]) -> Row:
    """Return the metrics of a step's updates: seconds and bytes are added up, of all else the mean is taken."""
    known = [name for name in learned[0] if all(name in row for row in learned)]
    totals = {name: sum(row[name] for row in learned) for name in known}
    added = ("perf/", "sync/sent_bytes")
    return {name: value if name.startswith(added) else value / len(learned) for name, value in totals.items()}
