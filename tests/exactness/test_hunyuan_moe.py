"""Hunyuan's experts: how many a row takes may stand in a list, and routers are float32 in a model of any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import HunYuanMoEV1ForCausalLM, PreTrainedModel

from samebit.kernels import BindingError, bind
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.weight_sync import WeightStream

from .compare import assert_matches_trainer
from .families import bound_model, make_model, token_ids
from .layouts import alone, assert_same_bits

NAME = "HunYuanMoEV1"
SEQUENCES = token_ids(40, 3, 70)
FEW = SamplingParams(max_tokens=7, seed=5, ignore_eos=True)
BFLOAT16 = RolloutConfig(dtype="bfloat16")


def check(worker: RolloutWorker, model: PreTrainedModel) -> None:
    assert_matches_trainer(model, worker.generate(SEQUENCES, FEW), [FEW] * len(SEQUENCES))


@pytest.mark.parametrize("given", [4, [4, 4, 2]])
def test_one_number_for_all_layers_is_what_a_list_of_it_is(given: int | list[int]) -> None:
    """What a list says of layers behind the last has no effect."""
    with torch.no_grad():
        assert_same_bits(alone(bind(make_model(NAME, moe_topk=given)), SEQUENCES), alone(bound_model(NAME), SEQUENCES))


def test_another_number_in_each_layer_is_refused() -> None:
    with pytest.raises(BindingError, match=r"num_experts_per_tok=\[4, 2\], which differs from layer to layer; exact:"):
        bind(make_model(NAME, moe_topk=[4, 2]))


def test_routers_are_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    """Hugging Face loads a folder so in both versions; a worker of it, or of the module, has the trainer's bits."""
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    make_model(NAME).save_pretrained(first)
    model = HunYuanMoEV1ForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    routers = {name: one.dtype for name, one in model.named_parameters() if name.endswith(".gate.wg.weight")}
    assert routers == {f"model.layers.{layer}.mlp.gate.wg.weight": torch.float32 for layer in range(2)}
    trainer = bind(model)
    with RolloutWorker(trainer, config=BFLOAT16) as worker:
        check(worker, trainer)
    with RolloutWorker(first, config=BFLOAT16) as worker:
        check(worker, trainer)
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.mul_(0.5)
        trainer.save_pretrained(second)
        rounded = bind(HunYuanMoEV1ForCausalLM.from_pretrained(first, dtype=torch.bfloat16).bfloat16())
        rounded.save_pretrained(third)
        for source in (trainer, second, trainer.state_dict()):
            worker.receive_weights(source, verify=True)
            check(worker, trainer)
            worker.receive_weights(third)
        for source in (rounded, third, WeightStream.of(rounded)):
            worker.receive_weights(source, verify=True)
            check(worker, rounded)
            worker.receive_weights(second)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_float32_routers_are_sent_whole_where_fsdp2_shards_them_apart(one_rank: None, tmp_path: Path) -> None:
    """FSDP2, which wants one dtype in a group, makes a class of its own of each module that it shards."""
    make_model(NAME).save_pretrained(tmp_path)
    trainer: Any = bind(HunYuanMoEV1ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    for layer in trainer.model.layers:
        fully_shard(layer.mlp.gate)
        fully_shard(layer)
    fully_shard(trainer)
    with RolloutWorker(tmp_path, config=BFLOAT16) as worker:
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.mul_(0.5)
        report = worker.receive_weights(WeightStream.of(trainer, dtype=torch.bfloat16), verify=True)
        assert not report.casts
        check(worker, trainer)


def test_an_adapter_on_a_router_is_refused() -> None:
    trainer = get_peft_model(make_model(NAME), LoraConfig(r=4, target_modules=["wg"]))
    with pytest.raises(BindingError, match=r"an adapter on model\.layers\.0\.mlp\.gate\.wg, which is not bound"):
        bind(trainer)
