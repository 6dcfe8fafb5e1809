"""Define the sizes of the runs of `make verl-grpo`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samebit.recipes.verl_grpo import task


@dataclass(frozen=True)
class Shape:
    """Holds one size. options: of verl, over tiny.yaml. model: entries of the model's configuration. prompt_tokens: of
    each prompt, filled up with worked examples; 0 leaves it as it is. num_threads: of the trainer's process."""

    options: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    num_threads: int = 1

    def build(self, folder: Path, architecture: str) -> None:
        """Build the warmed-up model and the data."""
        task.build(
            folder,
            training=4096,
            held_out=64,
            warm=True,
            architecture=architecture,
            prompt_tokens=self.prompt_tokens,
            **self.model,
        )


SHAPES = {
    "small": Shape({"trainer.test_freq": 4}),
    # The layers of the 5 M model of benchmarks/rollout.py, and its 8 prompts of up to 256 tokens with 8 answers each.
    "full": Shape(
        {
            "data.train_batch_size": 8,
            "data.max_prompt_length": 256,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
        },
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
        },
        prompt_tokens=256,
        num_threads=2,
    ),
}
