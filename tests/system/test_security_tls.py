"""Mutual TLS on both sides with several workers: a change of any file reaches every process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin._acl import AclOperation
from kafka.errors import TopicAuthorizationFailedError

from tests.support.rigs.security_rig import (
    RECORDS,
    TIMEOUT_S,
    HalfTrimmed,
    assert_nothing_secret_was_said,
    half_trimmed,
    proxy_before,
    read_by_kafka_python,
    section,
)
from tests.support.rigs.waiting import until
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.secure_kafka import allow, allow_all
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

WORKERS = 2
AGAIN_S = 20.0
"""How long a client may fail silently before the test tries another client."""
FIRST, SECOND = "first-proxy", "second-proxy"
"""Principals of the proxy's certificates. The first may do everything. The second may describe topics only."""


@dataclass(frozen=True)
class Mutual:
    proxy: TidegateProcess
    topic: HalfTrimmed
    served: Path
    shown: Path
    trusted: Path

    def read(
        self, ca: Path, identity: Path, offset: int = 0, count: int = RECORDS, timeout_s: float = TIMEOUT_S
    ) -> list[tuple[int, bytes]]:
        settings = {
            "security_protocol": "SSL",
            "ssl_cafile": str(ca),
            "ssl_certfile": str(identity),
            "consumer_timeout_ms": int(1000 * timeout_s),
        }
        return read_by_kafka_python(self.proxy.bootstrap_servers, self.topic.topic, count, settings, offset)

    def replace(self, file: Path, by: Path) -> None:
        """Replaces a file atomically, as a certificate rotation does."""
        shutil.copy(by, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)


@pytest.fixture(scope="module")
def mutual(secured: KafkaCluster, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mutual]:
    home = tmp_path_factory.mktemp("mutual")
    served, shown, trusted = home / "served.pem", home / "shown.pem", home / "trusted.pem"
    shutil.copy(authority.identity("served"), served)
    shutil.copy(authority.identity(FIRST), shown)
    shutil.copy(authority.ca, trusted)
    allow_all(secured, f"CN={FIRST}")
    more = section("upstream.tls", {"ca": trusted, "certificate": shown})
    more += section("listener.tls", {"certificate": served, "client.ca": authority.ca, "client.auth": "required"})
    with proxy_before(secured, home, "SSL", more, ["mutual-*"], {"workers": WORKERS}) as proxy:
        topic = half_trimmed(secured, "mutual-topic")
        allow(secured, f"CN={SECOND}", topic.topic, [AclOperation.DESCRIBE])
        yield Mutual(proxy, topic, served, shown, trusted)
        assert_nothing_secret_was_said(proxy)


async def knock(host: str, port: int) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    await writer.wait_closed()


def issuer_of(proxy: TidegateProcess, identity: Path) -> bytes:
    """Returns the issuer of the certificate that the proxy shows to a new client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(identity)
    with (
        socket.create_connection(proxy.address, timeout=TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        return tls.getpeercert(binary_form=True) or b""


def workers_that_said(proxy: TidegateProcess, text: str) -> set[str]:
    lines = [line for line in proxy.output.read_text().splitlines() if text in line]
    return {found[0] for line in lines if (found := re.search(r"worker-\d", line))}


def test_both_tiers_by_mutual_tls_through_any_worker(mutual: Mutual, authority: Authority) -> None:
    client = authority.identity("client")
    assert mutual.read(authority.ca, client) == list(enumerate(mutual.topic.values))
    nameless = {"bootstrap.servers": mutual.proxy.bootstrap_servers, "group.id": "unused", "security.protocol": "SSL"}
    stranger = confluent_kafka.Consumer({**nameless, "ssl.ca.location": str(authority.ca)})

    def is_turned_down() -> bool:
        with pytest.raises(confluent_kafka.KafkaException):
            stranger.list_topics(timeout=5)
        return "the client sent no certificate" in mutual.proxy.output.read_text()

    until(is_turned_down)
    stranger.close()
    assert "every client has the rights of this certificate" in mutual.proxy.output.read_text()


def test_a_new_certificate_for_clients_reaches_every_worker(
    mutual: Mutual, authority: Authority, tmp_path: Path
) -> None:
    client, successor = authority.identity("client"), Authority(tmp_path / "successor")
    before = issuer_of(mutual.proxy, client)
    mutual.replace(mutual.served, successor.identity("served"))
    names = {f"worker-{number}" for number in range(1, WORKERS + 1)}

    def is_everywhere() -> bool:
        asyncio.run(knock(*mutual.proxy.address))
        return workers_that_said(mutual.proxy, "changed certificates are in use") == names

    until(is_everywhere)
    # Every worker shows the new certificate to new clients.
    assert before not in {issuer_of(mutual.proxy, client) for _ in range(20)}
    assert mutual.read(successor.ca, client, count=1) == [(0, mutual.topic.values[0])]
    mutual.replace(mutual.served, authority.identity("served"))
    until(lambda: not served_by_stranger(mutual, client, successor))


def served_by_stranger(mutual: Mutual, client: Path, stranger: Authority) -> bool:
    context = ssl.create_default_context(cafile=str(stranger.ca))
    context.load_cert_chain(client)
    try:
        with (
            socket.create_connection(mutual.proxy.address, timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost"),
        ):
            return True
    except ssl.SSLCertVerificationError:
        return False


def test_the_proxys_certificate_and_authority_change_while_it_runs(
    mutual: Mutual, authority: Authority, tmp_path: Path
) -> None:
    client = authority.identity("client")
    start = mutual.topic.local_log_start
    assert mutual.read(authority.ca, client, start, 1) == [(start, mutual.topic.values[start])]
    mutual.replace(mutual.shown, authority.identity(SECOND))
    until(lambda: not reads_again(mutual, authority.ca, client))
    mutual.replace(mutual.shown, authority.identity(FIRST))
    until(lambda: reads_again(mutual, authority.ca, client))

    mutual.replace(mutual.trusted, Authority(tmp_path / "stranger").ca)

    def is_turned_down() -> bool:
        asyncio.run(first_byte(mutual.proxy, authority, client))
        return workers_that_said(mutual.proxy, "its certificate is not accepted") != set()

    until(is_turned_down)
    mutual.replace(mutual.trusted, authority.ca)
    until(lambda: reads_again(mutual, authority.ca, client))


def reads_again(mutual: Mutual, ca: Path, client: Path) -> bool:
    try:
        return len(mutual.read(ca, client, 0, 1, timeout_s=AGAIN_S)) == 1
    except TopicAuthorizationFailedError:
        return False


async def first_byte(proxy: TidegateProcess, authority: Authority, identity: Path) -> None:
    """Sends so much of a request that the proxy connects to a broker."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.load_cert_chain(identity)
    host, port = proxy.address
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost")
    writer.write(bytes((0, 0, 0, 10, 0, 18, 0, 0, 0, 0, 0, 1, 255, 255)))
    with contextlib.suppress(OSError):
        await reader.read(1)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
