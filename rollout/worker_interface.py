"""Say what a worker is to its callers, wherever it runs: in this process, in an actor of Ray, behind a server.

Invariants
----------
* An option of an update is named here, in `UpdateOptions` and `UpdateKeywords`, and nowhere else: who stands between a
  caller and the worker hands the keywords on as they came.
* Wrong options raise where they are given, before anything travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from samebit.rollout.checks import check_bool
from samebit.rollout.control.weights.transaction import check_update_args
from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.requests.limits import RequestLimits
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync import SyncReport, UpdateTerms

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from samebit.rollout.adapters.loading import AdapterKeywords


class UpdateKeywords(TypedDict, total=False):
    """Names the keywords of `receive_weights`; see `UpdateOptions`."""

    version: int | None
    in_flight: str
    partial: bool
    cast: bool
    verify: bool


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Says how an update of the weights is taken.

    version: of the weights after it, above the current one; None for the next.
    in_flight: what becomes of the requests that have begun: "keep" goes on with the KV they have, "recompute" computes
        it again under the new weights, "wait" lets them finish first, "abort" ends them with what they have.
    partial: some tensors may be missing.
    cast: tensors may have other floating dtypes than the model's.
    verify: read back what was written.
    """

    version: int | None = None
    in_flight: str = "keep"
    partial: bool = False
    cast: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        check_update_args(self.version, self.in_flight)
        for name in ("partial", "cast", "verify"):
            check_bool(name, vars(self)[name])

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> UpdateOptions:
        """Check the keywords of a call.

        Raises:
            TypeError: an unknown one, by name.
            ValueError: a value that is not allowed.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise TypeError(f"an update has no option {', '.join(unknown)}; there are {', '.join(known)}")
        return cls(**given)

    @property
    def terms(self) -> UpdateTerms:
        """Return the part that says which tensors are welcome."""
        return UpdateTerms(partial=self.partial, cast=self.cast)


def checked_state_dict(given: object) -> Mapping[str, object]:
    """Return what `load_state_dict` was given, if it is a mapping; raise `TypeError` for anything else."""
    if not isinstance(given, Mapping):
        raise TypeError(f"load_state_dict takes a dict of tensors, got {type(given).__name__}")
    return given


class Handle(Protocol):
    """Stands for a request that was submitted."""

    @property
    def request_id(self) -> str: ...

    @property
    def done(self) -> bool: ...

    def cancel(self) -> None: ...

    def result(self, timeout: float | None = None) -> RequestOutput: ...

    async def result_async(self) -> RequestOutput: ...


class Worker(Protocol):
    """Lists the calls that every worker answers; `RolloutWorker` says what each does."""

    @property
    def weight_version(self) -> int: ...

    def generate(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...

    def submit(
        self, prompt: GivenPrompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> Handle: ...

    def submit_all(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> Sequence[Handle]: ...

    def abort(self, request_ids: str | Iterable[str]) -> None: ...

    def receive_weights(self, source: object = None, **options: Unpack[UpdateKeywords]) -> SyncReport: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], *, cast: bool = False) -> SyncReport: ...

    @property
    def adapters(self) -> list[str]: ...

    def load_adapter(self, name: str, source: object, **options: Unpack[AdapterKeywords]) -> SyncReport: ...

    def drop_adapter(self, name: str, *, in_flight: str = "finish") -> None: ...

    def sleep(self, tags: str | Iterable[str] = TAGS, level: int = 1) -> None: ...

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None: ...

    def pause(self, mode: str = "keep") -> None: ...

    def resume(self) -> None: ...

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class LocalWorker(Worker, Protocol):
    """Lists what a worker in this process answers beside, as an actor or a server has one inside."""

    @property
    def limits(self) -> RequestLimits: ...

    @property
    def paused(self) -> bool: ...

    @property
    def sleeping(self) -> tuple[str, ...]: ...

    def preparation(self, params: SamplingParams) -> Callable[[], object] | None: ...

    def check_usable(self) -> None: ...

    def trouble(self) -> str | None: ...
