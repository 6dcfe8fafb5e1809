"""verl's replay buffers, asked ten times a second and not every two seconds: a tiny step is shorter than that."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_SECONDS = 0.1


class OnPolicy(ReplayBuffer):
    """Of the trainer mode "sync"."""

    def __init__(self, **options: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **options)


class OffPolicy(ReplayBufferAsync):
    """Of the other modes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **options)
