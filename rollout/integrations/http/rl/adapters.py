"""Load adapters from folders below the root that the operator named, as vLLM's clients ask for it, and drop them.

Invariant: an adapter that is there is replaced only where the caller says so (`load_inplace`).
"""

from __future__ import annotations

import asyncio

from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.rl.folders import below
from samebit.rollout.integrations.http.service import Service


class AdapterLoads:
    """Loads and drops, one call at a time."""

    def __init__(self, worker: AsyncWorker, service: Service) -> None:
        self._worker = worker
        self._service = service
        self._turn = asyncio.Lock()

    async def load(self, name: str, folder: str, *, replace: bool) -> None:
        """Load an adapter, or with `replace` a new version of it.

        Raises:
            ApiError: there is one of this name, or the folder may not be read.
            AdapterError: it is no adapter that can be served.
        """
        service = self._service
        path = below(service.settings.weight_root, folder, "lora_path")
        async with self._turn:
            if name == service.model.name:
                raise ApiError(400, f"{name!r} is the model that is served; give another name", param="lora_name")
            if name in await self._worker.adapters() and not replace:
                raise ApiError(
                    400, f"there is an adapter {name!r}: unload it, or set load_inplace=true", param="lora_name"
                )
            await self._worker.load_adapter(name, str(path))
            service.model.adapter_folders[name] = folder

    async def unload(self, name: str) -> None:
        """Forget an adapter; requests that have begun end under it.

        Raises:
            ApiError: none was loaded under this name.
        """
        async with self._turn:
            if name not in self._service.model.adapter_folders:
                raise ApiError(404, f"no adapter {name!r} was loaded here", param="lora_name", code="not_found")
            await self._worker.drop_adapter(name)
            del self._service.model.adapter_folders[name]
