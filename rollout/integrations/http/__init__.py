"""Serve a worker over HTTP: OpenAI's endpoints, the RL dialect of vLLM's, metrics.

Floors, from the top: `serving` (process, sockets, signals) > `app` (routes) > `openai`, `rl`, `metrics` > `service`
(what all handlers share: the worker, the queue, the streams) > `settings`, `errors`.
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
