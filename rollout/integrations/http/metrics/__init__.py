"""Metrics of a server, under vLLM's names where it has one: of the worker (`worker`), of requests (`requests`), and a
dashboard for Grafana (`dashboard.json`)."""
