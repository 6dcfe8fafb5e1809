"""Describe what the RL dialect takes. A field that is not named here is refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from samebit.rollout.integrations.http.openai.requests import (
    Count,
    RequestId,
    Salt,
    Sampling,
    StreamOptions,
    Strict,
    Texts,
    TokenIds,
)

Name = Annotated[str, Field(min_length=1, max_length=1024)]
Names = Annotated[list[Name], Field(fail_fast=True)]
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 40)]], Field(fail_fast=True)]


class GenerateSampling(Sampling):
    """Holds the sampling parameters of vLLM. Those about text (`detokenize` and what is below it) say something only
    with output_mode "text".

    cache_salt, return_token_ids: the request's, which prime-rl puts here. routed_experts_prompt_start: from where on
    verifiers would read routed experts, of which no answer has any.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    cache_salt: Salt | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: Count | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class GenerateRequest(Strict):
    """Asks for continuations of token ids."""

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: GenerateSampling = Field(default_factory=lambda: GenerateSampling())
    request_id: RequestId | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Literal[0] = 0
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"


class AbortRequest(Strict):
    """Names requests to end; none for all."""

    request_ids: Texts | None = None


class InitTransfer(Strict):
    """Says over what weights will come."""

    init_info: GlooInit | SharedMemoryInit


class GlooInit(Strict):
    """Names a gloo group whose rank 0 broadcasts tensors, one after the other."""

    backend: Literal["gloo"]
    master_address: Name
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2)] = 2
    timeout: Annotated[float, Field(gt=0, le=3600)] = 300.0


class SharedMemoryInit(Strict):
    """Names a `SharedMemorySender` of this machine."""

    backend: Literal["shared_memory"]
    address: Name
    timeout: Annotated[float, Field(gt=0, le=3600)] = 300.0


class UpdateInfo(Strict):
    """Names the tensors that come, in their order. All empty for a sender that says so itself (shared memory)."""

    names: Names = Field(default_factory=list)
    dtype_names: Names = Field(default_factory=list)
    shapes: Annotated[list[Shape], Field(fail_fast=True)] = Field(default_factory=list)
    packed: Literal[False] = False


class UpdateWeights(Strict):
    """Brings weights: over the transfer, or from a folder below the root that the server allows."""

    update_info: UpdateInfo | None = None
    weight_dir: Name | None = None


class StartUpdate(Strict):
    """Begins an update of several parts."""

    is_checkpoint_format: Literal[True] = True


class FinishUpdate(Strict):
    """Ends an update of several parts."""

    weight_version: Name | None = None


class NewVersion(Strict):
    """Names the weights that there are."""

    new_version: Name


class LoadAdapter(Strict):
    """Asks for the adapter of a folder below the root that the server allows, in peft's format. load_inplace: a new
    version of one that is there."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class UnloadAdapter(Strict):
    """Names an adapter to forget."""

    lora_name: Name
    lora_int_id: None = None


InitTransfer.model_rebuild()
