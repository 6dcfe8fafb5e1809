"""verl trains on images: its server reports the log-probabilities of its trainer, bit for bit, and the vision tower
travels.

What verl's agent loops make of a prompt, and hand to servers and trainer, is made by verl's own classes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch import distributed as dist
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from samebit.rollout import RequestError, RolloutConfig
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.integrations.ray import SharedMemoryAt
from samebit.rollout.integrations.verl.options import ServerOptions
from samebit.rollout.integrations.verl.server.server import SamebitServer
from samebit.rollout.integrations.verl.trainer.engine import SamebitEngine
from samebit.weight_sync import SharedMemorySender

from ...patience import HANG
from .verl_model import save_model
from .verl_vision_model import OF_VIDEOS, PLACEHOLDER, picture, save_vision_model

NAMES = {"float32": "fp32", "bfloat16": "bf16"}
TEMPERATURE = 0.7
PARAMS = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
PACKINGS: dict[str, dict[str, Any]] = {
    "padded": {"use_remove_padding": False, "micro_batch_size_per_gpu": 8},
    "packed": {"micro_batch_size_per_gpu": 8},
    "packed, two by two": {"micro_batch_size_per_gpu": 2},  # two of text alone among them
}
CONVERSATIONS: list[list[Image.Image]] = [
    [picture(20, 28, 1)],
    [],
    [picture(16, 16, 2), picture(32, 24, 3)],
    [picture(20, 28, 4)],  # the first prompt's placeholders, and other pixels
]


def options(folder: Path, dtype: str = "float32", **changes: Any) -> ServerOptions:
    made = ServerOptions(
        name="server",
        model=str(folder),
        tokenizer=str(folder),
        worker=RolloutConfig(dtype=dtype, max_num_seqs=8, max_num_batched_tokens=8, block_size=16, images=True),
        prompt_length=64,
        response_length=12,
        repetition_penalty=1.0,
        ignore_eos=True,
        frees_memory=True,
        num_cpus=1,
        sync_timeout=HANG,
        routed_experts=False,
        traces=None,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def classes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the forwards of Qwen's classes back, which verl replaces for good."""
    for module, prefix in ((modeling_qwen2_5_vl, "Qwen2_5_VL"), (modeling_qwen2_vl, "Qwen2VL")):
        for name in ("Model", "Attention", "ForConditionalGeneration"):
            kind = vars(module)[prefix + name]
            monkeypatch.setattr(kind, "forward", kind.forward)


class Loop:
    """Does what verl's agent loops do of a prompt with images, by verl's own functions."""

    def __init__(self, folder: Path) -> None:
        self._processor = hf_processor(str(folder), trust_remote_code=False)
        tokenizer = hf_tokenizer(str(folder))
        self._worker: Any = AgentLoopWorker.__new__(AgentLoopWorker)
        vars(self._worker).update(processor=self._processor, tokenizer=tokenizer, mm_processor_kwargs={})
        self._builder = create_continuous_token_builder(
            tokenizer, hf_model_type="qwen2_5_vl", processor=self._processor
        )

    def prompt(self, images: list[Image.Image]) -> list[int]:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "12+34="}]
        ids: list[int] = self._builder.build_initial_tokens([{"role": "user", "content": content}], images=images)
        return ids

    def trained(self, prompt: list[int], response: list[int], images: list[Image.Image]) -> dict[str, Any]:
        """Return a row of the trainer's batch."""
        ids = torch.tensor(prompt + response)
        output = SimpleNamespace(multi_modal_data={"images": images} if images else {}, mm_processor_kwargs={})
        inputs = self._worker._compute_multi_modal_inputs(output, ids)
        positions = self._worker._compute_position_ids(ids[None], torch.ones_like(ids)[None], inputs)
        mask = torch.tensor([0.0] * len(prompt) + [1.0] * len(response))
        return {"input_ids": ids, "position_ids": positions[0], "loss_mask": mask, "multi_modal_inputs": inputs}


def build(folder: Path, dtype: str) -> SamebitEngine:
    precision = {"param_dtype": NAMES[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = SamebitEngine(
        HFModelConfig(
            path=str(folder), use_fused_kernels=True, fused_kernel_options={"impl_backend": "samebit", "images": True}
        ),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=precision, use_fused_kernels=True),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=4, lr_warmup_steps_ratio=0.0),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch(rows: list[dict[str, Any]], **changes: Any) -> Any:
    def nested(name: str) -> Tensor:
        return torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)

    tensors: dict[str, Any] = {name: nested(name) for name in ("input_ids", "position_ids", "loss_mask")}
    tensors["multi_modal_inputs"] = [row["multi_modal_inputs"] for row in rows]
    usual = {
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "use_fused_kernels": True,
        "temperature": TEMPERATURE,
        "calculate_entropy": True,
        "pad_token_id": 0,
        "global_batch_size": len(rows),
        "micro_batch_size_per_gpu": 8,
    }
    return tensordict_utils.get_tensordict(tensors, {**usual, **changes})


def scored(engine: SamebitEngine, rows: list[dict[str, Any]], **changes: Any) -> list[list[float]]:
    """Return the trainer's log-probabilities of what was sampled."""
    with engine.eval_mode():
        found = engine.infer_batch(batch(rows, **changes))["model_output"]["log_probs"]
    masks = [row["loss_mask"][1:].bool() for row in rows]
    return [values[:-1][mask].tolist() for values, mask in zip(found.unbind(), masks, strict=True)]


def train(engine: SamebitEngine, rows: list[dict[str, Any]]) -> None:
    def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        return -torch.cat(list(model_output["log_probs"].unbind())).sum(), {}

    with engine.train_mode():
        engine.train_batch(batch(rows), loss)


async def served(server: SamebitServer, prompts: list[list[int]]) -> list[tuple[int, TokenOutput]]:
    """Return two responses to each conversation, asked for at once."""
    asked = [number for number, _ in enumerate(CONVERSATIONS) for _ in range(2)]
    requests = [
        server.generate(prompts[number], dict(PARAMS), f"{number}", image_data=CONVERSATIONS[number] or None)
        for number in asked
    ]
    return list(zip(asked, await asyncio.gather(*requests), strict=True))


async def update(server: SamebitServer, engine: SamebitEngine, step: int) -> set[str]:
    """Send the trainer's weights; return the names of those of vision."""
    stream, _ = engine.get_per_tensor_param()
    with SharedMemorySender(timeout=HANG) as sender:
        sent = asyncio.create_task(asyncio.to_thread(sender.send, stream))
        report = await server.receive_weights(SharedMemoryAt(sender.address))
        await sent
    await server.set_global_steps(report.version, step)
    return {name for name in stream.specs if ".visual." in name}


@pytest.mark.usefixtures("one_rank", "classes_stay")
@pytest.mark.parametrize("dtype", NAMES)
def test_the_server_reports_the_trainers_log_probabilities_of_prompts_with_images(folder: Path, dtype: str) -> None:
    """The server reports the trainer's log-probabilities: of text and images side by side, prefilled eight tokens at a
    time, for two weights, between which all parts of the tower learn.
    """
    loop, engine = Loop(folder), build(folder, dtype)
    tower = {name: value for name, value in engine.module.named_parameters() if ".visual." in name}
    before = {name: value.full_tensor().clone() for name, value in tower.items()}

    async def check() -> None:
        server = SamebitServer()
        await server.load(options(folder, dtype), RolloutMode.HYBRID)
        try:
            prompts = [loop.prompt(images) for images in CONVERSATIONS]
            assert prompts[0] == prompts[3], "other pixels alone tell them apart"
            for step in range(2):
                answers = await served(server, prompts)
                rows = [loop.trained(prompts[number], one.token_ids, CONVERSATIONS[number]) for number, one in answers]
                for name, packing in PACKINGS.items():
                    assert scored(engine, rows, **packing) == [one.log_probs for _, one in answers], (step, name)
                train(engine, rows)
                assert {f"model.visual.{name}" for name in named(engine)} == await update(server, engine, step + 1)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(check(), HANG))
    unmoved = [name for name, value in tower.items() if torch.equal(value.full_tensor(), before[name])]
    assert not unmoved


def named(engine: SamebitEngine) -> set[str]:
    return {name.partition(".visual.")[2] for name, _ in engine.module.named_parameters() if ".visual." in name}


def test_placeholders_are_never_sampled(folder: Path) -> None:
    """Placeholders are never sampled: verl would look for their images. Whatever a request asks for."""
    loop = Loop(folder)
    tokenizer = hf_tokenizer(str(folder))
    image, video = tokenizer.convert_tokens_to_ids([PLACEHOLDER, OF_VIDEOS])

    async def check() -> None:
        server = SamebitServer()
        await server.load(options(folder, response_length=100), RolloutMode.HYBRID)
        try:
            asked = {**PARAMS, "logit_bias": {image: 100.0, video: 50.0, 4: 60.0}}
            for images in CONVERSATIONS[:2]:
                found: TokenOutput = await server.generate(loop.prompt(images), asked, "a", image_data=images)
                assert set(found.token_ids) == {4}
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(check(), HANG))


def test_what_is_no_image_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    text = save_model(tmp_path)

    async def refused(server: SamebitServer, message: str, **given: Any) -> None:
        with pytest.raises(RequestError, match=message):
            await server.generate([1, 5], dict(PARAMS), "a", **given)

    async def check() -> None:
        server = SamebitServer()
        await server.load(options(folder), RolloutMode.HYBRID)
        try:
            await refused(server, "no video or audio, got video_data", video_data=[object()])
            await refused(server, "no video or audio, got audio_data", audio_data=[object()])
            await refused(server, r"runs of \[\] placeholders", image_data=[picture(16, 16, 0)])
        finally:
            await server.close()
        of_text = SamebitServer()
        await of_text.load(options(text, worker=RolloutConfig(dtype="float32")), RolloutMode.HYBRID)
        try:
            await refused(of_text, "text only.*got image_data.*custom.images=True", image_data=[picture(16, 16, 0)])
        finally:
            await of_text.close()

    asyncio.run(asyncio.wait_for(check(), HANG))


@pytest.mark.filterwarnings("ignore:Failed to create processor")
def test_a_folder_without_a_processor_is_refused_by_name(tmp_path: Path) -> None:
    server = SamebitServer()
    with pytest.raises(ModelLoadError, match=r"custom\.images=True, and verl makes no processor of"):
        asyncio.run(server.load(options(save_model(tmp_path)), RolloutMode.HYBRID))
