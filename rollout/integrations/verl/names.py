"""Name samebit in verl, and its servers in Ray."""

NAME = "samebit"


def server_name(replica_rank: int, *, kind: str = "", suffix: str = "") -> str:
    """Return the name of a server; `kind`: "reward" or "teacher" for a server of such a model."""
    return f"samebit_server_{kind}{'_' if kind else ''}{replica_rank}{suffix}"
