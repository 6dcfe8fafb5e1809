"""Move weights into a model: what may be offered, what is checked, what is written.

Floors, from the top, each importing from itself and those below: `opened_update` (the entry) > `transports` > `wire`
(the protocol) > `in_place` (what others write) > `source`, `apply` (within a process), `sleeping` (their memory, given
back and taken again), `quantized`, `adapter_names` (what a folder and an adapter need besides) > `manifest` and
`folder_names` (which tensor goes where), `digest`, `report`, `arithmetic`, `closing`. Imports nothing of
`samebit.rollout` or `samebit.kernels`.

The way through: `manifest`, `source`, `apply`, `opened_update` for an update within a process; then `wire`.
"""

from samebit.weight_sync.apply import PreparedUpdate
from samebit.weight_sync.manifest import (
    Manifest,
    NonFiniteWeightError,
    TensorSpec,
    UpdateTerms,
    WeightMismatchError,
)
from samebit.weight_sync.opened_update import apply_weights, open_update
from samebit.weight_sync.report import SyncBrokenError, SyncReport, VerificationError
from samebit.weight_sync.source import TensorSource, WeightSourceError, open_source
from samebit.weight_sync.transports.broadcast import (
    BroadcastReceiver,
    BroadcastSender,
)
from samebit.weight_sync.transports.cuda.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from samebit.weight_sync.transports.groups import connected_store, gloo_group, listening_store, nccl_group
from samebit.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from samebit.weight_sync.wire.link import PeerLostError, ReceiverLink, SyncRefusedError, SyncTimeoutError
from samebit.weight_sync.wire.sender import SendReport, WeightSender
from samebit.weight_sync.wire.stream import WeightStream

__all__ = [
    "BroadcastReceiver",
    "BroadcastSender",
    "CudaIpcReceiver",
    "CudaIpcSender",
    "Manifest",
    "NonFiniteWeightError",
    "PeerLostError",
    "PreparedUpdate",
    "ReceiverLink",
    "SendReport",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "SyncBrokenError",
    "SyncRefusedError",
    "SyncReport",
    "SyncTimeoutError",
    "TensorSource",
    "TensorSpec",
    "UpdateTerms",
    "VerificationError",
    "WeightMismatchError",
    "WeightSender",
    "WeightSourceError",
    "WeightStream",
    "apply_weights",
    "connected_store",
    "gloo_group",
    "listening_store",
    "nccl_group",
    "open_source",
    "open_update",
]
