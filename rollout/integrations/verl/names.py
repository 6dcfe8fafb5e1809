"""What the servers are called in Ray."""


def server_name(replica_rank: int, *, kind: str = "", suffix: str = "") -> str:
    """`kind`: "reward" or "teacher" for a server of such a model."""
    return f"samebit_server_{kind}{'_' if kind else ''}{replica_rank}{suffix}"
