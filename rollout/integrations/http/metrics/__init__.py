"""Give a server's metrics, under vLLM's names where it has one: of the `worker`, of `requests`, and a dashboard for
Grafana (`dashboard.json`).

Imports `served` and `service` of `http`, `control` and `fleet` for what they report, and outputs.
"""
