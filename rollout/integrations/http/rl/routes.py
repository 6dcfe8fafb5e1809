"""List the endpoints of the RL dialect. What each does to the worker, the worker's own methods say."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.integrations.http.errors import ApiError, JsonAnswer
from samebit.rollout.integrations.http.openai.routes import ERRORS
from samebit.rollout.integrations.http.rl import requests
from samebit.rollout.integrations.http.rl.adapters import AdapterLoads
from samebit.rollout.integrations.http.rl.generate import GenerateAnswer, generate
from samebit.rollout.integrations.http.rl.options import (
    Level,
    Mode,
    Nothing,
    Pause,
    ResetPrefixCache,
    Sleep,
    Tags,
    WakeTags,
    WakeUp,
    options,
)
from samebit.rollout.integrations.http.rl.weights import WeightTransfer
from samebit.rollout.integrations.http.served import replicas_of
from samebit.rollout.integrations.http.service import Service
from samebit.weight_sync.transports.addresses import Sources

_ANY_ADAPTER = {"max_lora_rank": 1 << 16, "max_loras": 1 << 16}
"""Stands in /server_info for limits that there are not; clients compare with them."""
CONTROL_PATHS = frozenset(
    (
        "/pause", "/resume", "/is_paused", "/abort_requests", "/sleep", "/wake_up", "/is_sleeping",
        "/reset_prefix_cache", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
        "/finish_weight_update", "/shutdown_weight_transfer_engine", "/update_weight_version", "/weight_info",
        "/get_world_size", "/server_info", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc",
    )
)  # fmt: skip


def generate_routes(service: Service) -> APIRouter:
    """Return the endpoint for token ids."""
    router = APIRouter(responses=ERRORS)

    @router.post("/inference/v1/generate", response_model=GenerateAnswer)
    async def inference(asked: requests.GenerateRequest, request: Request) -> Response:
        """Continue token ids."""
        return await generate(service, asked, request)

    return router


def control_routes(service: Service, kind: type[APIRoute] = APIRoute) -> APIRouter:
    """Return the endpoints that command the worker, as routes of this kind."""
    router = APIRouter(responses=ERRORS, route_class=kind)
    inside = AsyncWorker(Sources(), service.worker)
    _add_pauses(router, service, inside)
    _add_memory(router, service, inside)
    _add_weights(router, service, inside)
    _add_adapters(router, service, inside)
    _add_refused(router)
    return router


def _add_pauses(router: APIRouter, service: Service, inside: AsyncWorker) -> None:
    @router.post("/pause")
    async def pause(
        mode: Mode | None = None,
        clear_cache: bool | None = None,
        wait_for_inflight_requests: bool | None = None,
        asked: Pause | None = None,
    ) -> Response:
        """Stand still; the cache is cleared unless requests are kept."""
        how = options(
            Pause, asked, mode=mode, clear_cache=clear_cache, wait_for_inflight_requests=wait_for_inflight_requests
        )
        mode = "wait" if how.wait_for_inflight_requests else how.mode
        await inside.pause(mode)
        if how.clear_cache and mode != "keep":
            await inside.reset_prefix_cache()
        return JsonAnswer({"status": "paused"})

    @router.post("/resume")
    async def resume(_: Nothing | None = None) -> Response:
        """Go on."""
        await inside.resume()
        return JsonAnswer({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return JsonAnswer({"is_paused": service.worker.paused})

    @router.post("/abort_requests")
    async def abort_requests(asked: requests.AbortRequest) -> Response:
        """End requests with what they have; all of them where none is named."""
        ids = list(service.running) if asked.request_ids is None else asked.request_ids
        handles = [handle for name in ids for handle in service.running.get(name, ())]
        service.worker.abort([handle.request_id for handle in handles])
        return JsonAnswer({"status": "aborted", "aborted": len({name for name in ids if name in service.running})})


def _add_memory(router: APIRouter, service: Service, inside: AsyncWorker) -> None:
    @router.post("/sleep")
    async def sleep(
        level: Annotated[Level | None, Query()] = None,
        tags: Annotated[Tags | None, Query()] = None,
        asked: Sleep | None = None,
    ) -> Response:
        """Give memory back. Level 0 pauses, 1 keeps a copy of the weights, 2 discards them."""
        began = time.monotonic()
        how = options(Sleep, asked, level=level, tags=tags)
        if how.level == 0 and how.tags:
            raise ApiError(400, "tags go with level 1 or 2: level 0 pauses, and releases nothing", param="tags")
        if how.level == 0:
            await inside.pause()
        else:
            await inside.sleep(how.tags or TAGS, how.level)
        return JsonAnswer({"status": "sleeping", "level": how.level, "elapsed_ms": _milliseconds(began)})

    @router.post("/wake_up")
    async def wake_up(tags: Annotated[WakeTags | None, Query()] = None, asked: WakeUp | None = None) -> Response:
        """Take memory again, of these tags or all of it, and end a pause once nothing sleeps, as vLLM does."""
        began = time.monotonic()
        woken = options(WakeUp, asked, tags=tags).tags or None
        memory = None if woken is None else [tag for tag in woken if tag != "scheduling"]
        if memory is None or memory:
            await inside.wake_up(memory)
        asleep = bool(service.worker.sleeping)
        if service.worker.paused and not asleep:
            await inside.resume()
        status = "sleeping" if asleep else "awake"
        return JsonAnswer({"status": status, "tags_woken": woken, "elapsed_ms": _milliseconds(began)})

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return JsonAnswer({"is_sleeping": bool(service.worker.sleeping), "tags": list(service.worker.sleeping)})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(
        reset_running_requests: bool | None = None,
        reset_external: bool | None = None,
        asked: ResetPrefixCache | None = None,
    ) -> Response:
        """Forget what was computed; running requests too compute theirs again, if asked."""
        how = options(
            ResetPrefixCache, asked, reset_running_requests=reset_running_requests, reset_external=reset_external
        )
        if how.reset_external:
            raise ApiError(400, "there is no external cache: leave reset_external at false", param="reset_external")
        await inside.reset_prefix_cache(recompute_running=how.reset_running_requests)
        return JsonAnswer({"success": True})


def _add_weights(router: APIRouter, service: Service, inside: AsyncWorker) -> None:
    transfer = WeightTransfer(inside, service.settings.weight_root, service.versions, service.metrics)

    @router.post("/init_weight_transfer_engine")
    async def init(asked: requests.InitTransfer) -> Response:
        """Agree on a transfer."""
        await transfer.init(asked.init_info)
        return JsonAnswer({"message": "Weight transfer initialized"})

    @router.post("/shutdown_weight_transfer_engine")
    async def shut_down(_: Nothing | None = None) -> Response:
        """Give up the transfer."""
        await transfer.shut_down()
        return JsonAnswer({"message": "Weight transfer shut down"})

    @router.post("/start_weight_update")
    async def start(asked: requests.StartUpdate | None = None) -> Response:
        """Begin an update of several parts."""
        await transfer.start()
        return JsonAnswer({"message": "Weight update started"})

    @router.post("/update_weights")
    async def update(asked: requests.UpdateWeights) -> Response:
        """Take a part over the transfer, or the weights of a folder."""
        if (asked.update_info is None) == (asked.weight_dir is None):
            raise ApiError(400, "either update_info or weight_dir is given", param="update_info")
        if asked.update_info is not None:
            await transfer.update(asked.update_info)
        elif asked.weight_dir is not None:
            await transfer.from_folder(asked.weight_dir)
        return JsonAnswer({"message": "Weights updated"})

    @router.post("/finish_weight_update")
    async def finish(asked: requests.FinishUpdate | None = None) -> Response:
        """Write what has come."""
        await transfer.finish(None if asked is None else asked.weight_version)
        return JsonAnswer({"message": "Weight update finished"})

    @router.post("/update_weight_version")
    async def name_version(asked: requests.NewVersion) -> Response:
        """Name the weights that there are."""
        service.versions.give(service.worker.weight_version, asked.new_version)
        return JsonAnswer({"success": True, "new_version": asked.new_version})

    @router.get("/weight_info")
    async def weight_info() -> Response:
        return JsonAnswer({"weight_version": service.versions.name(service.worker.weight_version)})

    @router.get("/get_world_size")
    async def world_size(include_dp: bool = True) -> Response:
        """Count the workers, or with `include_dp=false` the processes of one of them."""
        return JsonAnswer({"world_size": replicas_of(service.worker) if include_dp else 1})

    @router.get("/server_info")
    async def server_info(config_format: Literal["json"] = "json") -> Response:
        return JsonAnswer(_server_info(service))


def _add_adapters(router: APIRouter, service: Service, inside: AsyncWorker) -> None:
    loads = AdapterLoads(inside, service)

    @router.post("/v1/load_lora_adapter")
    async def load(asked: requests.LoadAdapter) -> Response:
        """Load an adapter; requests then name it as their model."""
        await loads.load(asked.lora_name, asked.lora_path, replace=asked.load_inplace)
        return JsonAnswer(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload(asked: requests.UnloadAdapter) -> Response:
        """Forget an adapter."""
        await loads.unload(asked.lora_name)
        return JsonAnswer(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _add_refused(router: APIRouter) -> None:
    def refuse(path: str, why: str) -> None:
        async def refused() -> Response:
            raise ApiError(400, why, code="not_offered")

        router.add_api_route(path, refused, methods=["POST"])

    refuse("/collective_rpc", "no code comes over HTTP: collective_rpc is not offered")


def _server_info(service: Service) -> dict[str, Any]:
    """Return how the server is set up, under vLLM's names, and under samebit's."""
    config, limits, replicas = service.worker.config, service.worker.limits, replicas_of(service.worker)
    shown = ((name, value) for name, value in vars(config).items() if name != "digest_key")
    settings: dict[str, Any] = {name: _plain(value) for name, value in shown}
    return {
        "vllm_config": {
            "model_config": {
                "model": service.model.name,
                "served_model_name": service.model.name,
                "max_model_len": limits.max_model_len,
                "dtype": str(limits.dtype),
                "logprobs_mode": "processed_logprobs" if not config.exact else "exact: at the sampling temperature",
            },
            "cache_config": {"block_size": limits.block_size, "num_gpu_blocks": limits.num_blocks},
            "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": replicas, "world_size": replicas},
            "scheduler_config": {
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
            },
            "lora_config": None if service.settings.weight_root is None else _ANY_ADAPTER,
            "weight_transfer_config": {"backend": "gloo"},
        },
        "samebit": settings,
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _milliseconds(began: float) -> float:
    return round(1e3 * (time.monotonic() - began), 2)
