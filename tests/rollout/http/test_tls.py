"""The server stands behind a certificate of its own making."""

from __future__ import annotations

import ipaddress
import ssl
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest

from samebit.rollout.integrations.http.serving import Server, open_sockets

from ...patience import HANG
from .served import NAME, Served
from .test_streams import beside

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    today = datetime.now(timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - timedelta(days=1))
        .not_valid_after(today + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return certificate, secret


@pytest.fixture(scope="module")
def tls(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Give a server with TLS over the same worker: its port, and its certificate."""
    certificate, key = write_certificate(tmp_path_factory.mktemp("tls"))
    service = beside(served, port=0, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    server = Server(service, open_sockets(service.settings))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.port, certificate
    server.stop()
    thread.join()


def test_who_trusts_the_certificate_is_answered(tls: tuple[int, Path]) -> None:
    port, certificate = tls
    trusting = ssl.create_default_context(cafile=certificate)
    body = {"model": NAME, "prompt": "a", "max_tokens": 3, "ignore_eos": True, "stream": True}
    with httpx.Client(verify=trusting, timeout=HANG) as client:
        answer = client.post(f"https://127.0.0.1:{port}/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_who_does_not_and_who_speaks_plainly_are_not(tls: tuple[int, Path]) -> None:
    port, _ = tls
    with httpx.Client(verify=ssl.create_default_context(), timeout=HANG) as client:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            client.get(f"https://127.0.0.1:{port}/liveness")
        with pytest.raises(httpx.RemoteProtocolError):
            client.get(f"http://127.0.0.1:{port}/liveness")
