"""Run as one rank of replicas under DistributedDataParallel, which test_replicas.py forks: any difference raises.

Per case: replicas whose ranks score other tokens have the bits of one process, and of its gradients the mean.
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from samebit.kernels import bind, token_logprobs

CONFIG: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 20,
    "intermediate_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
WAYS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
IDS = torch.arange(2 * 3 * 9).view(2, 3, 9)
"""Holds three rows for each rank."""


def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def check(policy: PreTrainedModel, options: dict[str, Any]) -> None:
    alone = [copy.deepcopy(policy) for _ in IDS]
    expected = [token_logprobs(model, ids, temperature=0.7) for model, ids in zip(alone, IDS, strict=True)]
    for scores in expected:
        scores.sum().backward()
    replicas = DistributedDataParallel(copy.deepcopy(policy), **options)
    got = token_logprobs(replicas, IDS[dist.get_rank()], temperature=0.7)
    assert torch.equal(got, expected[dist.get_rank()])
    got.sum().backward()
    for mine, *others in zip(gradients(replicas.module), *map(gradients, alone), strict=True):
        assert torch.equal(mine, torch.stack(others).mean(0))


def check_nothing_to_score(policy: PreTrainedModel) -> None:
    """Check the gradients' mean where the first rank has something to score, and the others have zeros."""
    alone, replicas = copy.deepcopy(policy), DistributedDataParallel(copy.deepcopy(policy))
    token_logprobs(alone, IDS[0]).sum().backward()
    first = dist.get_rank() == 0
    token_logprobs(replicas, IDS[0] if first else IDS[0, :, :1]).sum().backward()
    for mine, whole in zip(gradients(replicas.module), gradients(alone), strict=True):
        assert torch.equal(mine, whole / dist.get_world_size())


def main(rank: int, folder: str, ranks: str) -> None:
    store = dist.FileStore(f"{folder}/store", int(ranks))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(ranks), timeout=timedelta(seconds=900))
    torch.manual_seed(3)
    policy = bind(Qwen3ForCausalLM(Qwen3Config(**CONFIG)))
    for options in WAYS:
        check(policy, options)
    check_nothing_to_score(policy)
    dist.destroy_process_group()
    sys.stdout.write("all went well\n")
