"""Fixtures: proxies for several test files, and Kafka's tools.

Each file gets its own proxy. At the end the fixture checks that the proxy logged no secret."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.kafka_tools import KafkaTools
from tests.support.rigs.security_rig import assert_nothing_secret_was_said, proxy_before, sasl, section
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.tidegate import TidegateProcess


@pytest.fixture(scope="session")
def tools() -> Iterator[KafkaTools]:
    """One Java process for all test files, since a new process has to load and compile the classes again."""
    made = KafkaTools()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def plain(secured: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidegateProcess]:
    """A proxy with plain text on both sides. It copies with SCRAM, in sessions that end every few seconds."""
    home = tmp_path_factory.mktemp("plain")
    with proxy_before(secured, home, "SASL_PLAINTEXT", sasl("SCRAM-SHA-512", home), ["tiered-*"]) as proxy:
        yield proxy
        assert_nothing_secret_was_said(proxy)


@pytest.fixture(scope="module")
def encrypted(
    secured: KafkaCluster, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TidegateProcess]:
    """A proxy with TLS on both sides. Its own connections authenticate with a token."""
    home = tmp_path_factory.mktemp("encrypted")
    more = sasl("OAUTHBEARER", home)
    more += section("upstream.tls", {"ca": authority.ca})
    more += section("listener.tls", {"certificate": authority.identity("proxy")})
    with proxy_before(secured, home, "SASL_SSL", more, ["sealed-*"]) as proxy:
        yield proxy
        assert_nothing_secret_was_said(proxy)
