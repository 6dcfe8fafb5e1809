"""Poll verl's replay buffers ten times a second instead of every two seconds: a tiny step is shorter than that."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_SECONDS = 0.1


class OnPolicy(ReplayBuffer):
    """Serves as the replay buffer of the trainer mode "sync"."""

    def __init__(self, **options: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **options)


class OffPolicy(ReplayBufferAsync):
    """Serves as the replay buffer of the other modes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **options)
