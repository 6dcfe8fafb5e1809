"""Serve a worker over HTTP: OpenAI's endpoints, the RL dialect of vLLM's, metrics.

Floors, from the top: `serving` (process, sockets, signals) > `app` (routes), `middleware` (the doors before them) >
`openai`, `rl`, `metrics` > `event_stream`, `service` (what all handlers share: the worker behind `served`, the queue in
`admission`, the streams in `step_hub`, spans in `tracing`, `versions` of weights; it holds the counters of `metrics`
and the sessions of `openai`) > `settings`, `errors`.

Imports what a worker's callers have, `adapters`, `requests`, `structured_outputs`, `control`, `fleet` and `ray` for
replicas, `samebit.weight_sync`, and of `samebit.kernels` the names of adapters.
"""

try:
    import fastapi  # noqa: F401
    import openai  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("fastapi", "openai", "prometheus_client", "uvicorn"):
        raise
    raise ImportError(f"samebit serve needs {error.name}: pip install 'samebit[serve]'") from error
