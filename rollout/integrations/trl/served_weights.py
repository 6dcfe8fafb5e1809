"""Give TRL's own AsyncGRPO the weight transfer of a run against `samebit serve`: gloo instead of NCCL."""

from __future__ import annotations

from typing import Any

from trl.experimental.async_grpo.vllm_client import VLLMClient

from samebit.rollout.integrations.gloo_weights import GlooWeights


class ServedWeights(GlooWeights):
    """Implements TRL's `WeightTransferProtocol`, for `trl.experimental.async_grpo.AsyncGRPOTrainer(weight_transfer=)`.

    Requests in flight are kept while the weights change, as TRL asks of a server.
    """

    def __init__(self, server_url: str, **options: Any) -> None:
        """Keep what to call. server_url: where the server's control endpoints are. options: those of `GlooWeights`."""
        self._server = VLLMClient(server_url)
        super().__init__(self._server, **options)

    def init_weight_transfer(self) -> None:
        self._server.wait_for_server_ready()
        super().init_weight_transfer()

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()
