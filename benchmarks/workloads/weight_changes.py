"""Measure how much of the weights a GRPO step changes: bytes of a delta over those of a full update.

The policy of recipes/grpo.py, in float32 (the master weights), learns on its own exact rollouts. After each step a
worker in bfloat16 is sent the difference, over shared memory and with all checksums, and its weights are read back.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from samebit.recipes import experiment
from samebit.recipes.experiment import Seed
from samebit.recipes.learner import Learner
from samebit.recipes.sampling import sample
from samebit.recipes.settings import OnPolicy
from samebit.recipes.sync import Update, in_place
from samebit.rollout import RolloutWorker
from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, SyncReport

RATES = (1e-6, 1e-5, 1e-4)


def delta_shares(steps: int, warmup: int, folder: Path) -> dict[float, list[float]]:
    """Return the share of each step, for each learning rate.

    All begin at one policy, after its warm-up of at most `warmup` steps on answers with working.
    """
    first = OnPolicy(
        out=folder / "delta",
        steps=steps,
        prompts=16,
        samples=8,
        held_out=20,
        eval_every=steps,
        max_num_seqs=128,
        warmup_cap=warmup,
        warmup_mixed=warmup // 5,
    )
    shares: dict[float, list[float]] = {}
    for rate in RATES:
        model = folder / "delta" / "seed0" / "warm" if shares else None
        settings = replace(first, lr=rate, model=model, out=first.out if model is None else folder / f"lr{rate}")
        shares[rate] = []
        experiment.run(settings, lambda seed, measured=shares[rate]: _train(seed, measured))
    return shares


def _train(seed: Seed, shares: list[float]) -> None:
    in_bfloat16 = replace(seed.config, dtype="bfloat16", num_blocks=8, kv_cache_gb=None, max_num_seqs=1)
    with (
        RolloutWorker(seed.policy, config=seed.config, tokenizer=seed.tokenizer) as worker,
        RolloutWorker(seed.folder, config=in_bfloat16) as receiver,
        Deltas(seed.policy, receiver) as deltas,
    ):
        learner = Learner(seed.policy, deltas.after(in_place(worker), shares), seed.tokenizer, seed.settings)
        for step, problems in zip(seed.steps(), seed.batches(), strict=False):
            scored = sample(worker, seed.tokenizer, problems, seed.params)
            seed.after(step, {**scored.metrics(), **learner.step(step, scored.trajectories())}, worker)


class Deltas:
    """Sends what changed to a second worker in this process."""

    def __init__(self, policy: PreTrainedModel, receiver: RolloutWorker) -> None:
        self._policy = policy
        self._receiver = receiver
        self._sender = SharedMemorySender()
        self._end = SharedMemoryReceiver(self._sender.address)
        self._other = ThreadPoolExecutor(1)

    def __enter__(self) -> "Deltas":
        self._send()
        return self

    def __exit__(self, *_: object) -> None:
        self._other.shutdown()
        self._end.close()
        self._sender.close()

    def after(self, update: Update, shares: list[float]) -> Update:
        """Make the update, then send a delta whose share of a full one is added to `shares`."""

        def both(change: Callable[[], object]) -> SyncReport:
            report = update(change)
            sent = self._send()
            shares.append(sent.sent_bytes / sent.dense_bytes)
            return report

        return both

    def _send(self) -> SyncReport:
        sending = self._other.submit(self._sender.send, self._policy, delta=True, dtype=torch.bfloat16)
        received = self._receiver.receive_weights(self._end, verify=True)
        sent = sending.result()
        if sent.digest != received.digest or sent.delta != (received.version > 1):
            raise RuntimeError("what arrived is not what was sent, or went as a full update")
        return received
