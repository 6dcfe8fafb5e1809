"""Name samebit in verl, and its servers in Ray."""

NAME = "samebit"

ADAPTER = "policy"
"""Names the adapter that is trained with `model.lora_rank`, on a server."""


IMAGES = "images"
"""Names what `run_check` writes into `model.fused_kernel_options` where `rollout.custom.images` is asked for: verl
tells the engine nothing of the rollout's options."""


def server_name(replica_rank: int, *, kind: str = "", suffix: str = "") -> str:
    """Return the name of a server; `kind`: "reward" or "teacher" for a server of such a model."""
    return f"samebit_server_{kind}{'_' if kind else ''}{replica_rank}{suffix}"
