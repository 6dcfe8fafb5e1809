"""How large the runs of `make verl-grpo` are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samebit.recipes.verl_grpo import task


@dataclass(frozen=True)
class Shape:
    """One size. options: of verl, over tiny.yaml. model: entries of the model's configuration; weights that are not the
    recipe's are random. prompt_tokens: of each prompt, filled up with worked examples; 0 leaves it as it is."""

    options: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0

    def build(self, folder: Path, architecture: str) -> None:
        """Model and data."""
        task.build(
            folder,
            training=4096,
            held_out=64,
            warm=not self.model,
            architecture=architecture,
            prompt_tokens=self.prompt_tokens,
            **self.model,
        )


SHAPES = {
    "small": Shape({"trainer.test_freq": 4}),
    # The workload of benchmarks/rollout.py.
    "full": Shape(
        {
            "data.train_batch_size": 8,
            "data.max_prompt_length": 256,
            "data.max_response_length": 128,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.rollout.ignore_eos": True,
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
    ),
}
