"""Whatever is asked within the OpenAPI description, or beside it, is answered as described and never with a 5xx."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error, response_schema_conformance, status_code_conformance

from .served import Served, serving

CASES = int(os.environ.get("SAMEBIT_SOAK_CASES", "0"))
FEW = ("/detokenize", "/inference/v1/generate", "/reset_prefix_cache", "/update_weight_version")
APART = ["/pause", "/sleep", "/metrics", "/init_weight_transfer_engine"]


@pytest.mark.soak
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_input_breaks_the_server(served: Served, mode: GenerationMode) -> None:
    """No input breaks the server, whose listener of control has every endpoint. Standing still, and waiting for a
    sender, are apart.
    """
    with serving(served.folder, "--control", "loopback", "--max-model-len", "40", "--max-n", "4") as short:
        schema = schemathesis.openapi.from_url(f"{short.control}/openapi.json").exclude(path=APART)
        operations = [operation.ok() for operation in schema.get_all_operations()]
        assert len(operations) > 20
        if not CASES:
            operations = [operation for operation in operations if operation.path in FEW]
        wide = [operation for operation in operations if operation.body or operation.query]
        each = max(2, CASES // (2 * len(wide)))
        seen: list[int] = []
        for operation in operations:

            @settings(
                max_examples=each, deadline=None, database=None,
                derandomize=not CASES, phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                response = case.call(timeout=300)
                seen.append(response.status_code)
                case.validate_response(
                    response, checks=[not_a_server_error, response_schema_conformance, status_code_conformance]
                )

            with suppress(Unsatisfiable):  # nothing can be wrong where nothing is asked
                ask()
        assert len(seen) >= min(CASES // 4, 1000)
        sys.stdout.write(f"{len(seen)} cases\n")
        assert short.http.get(f"{short.base}/readiness").status_code == 200
