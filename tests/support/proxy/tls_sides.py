"""TLS between clients, proxy and brokers: the contexts of each side, and who speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from proxy.config import ListenerTlsConfig
from proxy.wire.tls import listener_tls
from tests.support.fakes.broker.wire import Wire
from tests.support.servers.certificates import Authority
from tiers.broker.tls import TlsContext, client_context
from tiers.config.upstream_config import UpstreamConfig, UpstreamTlsConfig, upstream_tls


@contextlib.asynccontextmanager
async def connected_by_tls(port: int, tls: ssl.SSLContext) -> AsyncIterator[Wire]:
    streams = await asyncio.open_connection("127.0.0.1", port, limit=16 * 1024, ssl=tls, server_hostname="localhost")
    wire = Wire(*streams)
    try:
        yield wire
    finally:
        await wire.close()


def for_clients(authority: Authority, **more: object) -> TlsContext:
    tls = listener_tls(ListenerTlsConfig.model_validate({"certificate": authority.identity("proxy"), **more}))
    assert tls is not None
    return tls


def for_brokers(**settings: object) -> TlsContext:
    tls = UpstreamTlsConfig.model_validate(settings)
    made = upstream_tls(UpstreamConfig.model_validate({"bootstrap.servers": "a:1"}).model_copy(update={"tls": tls}))
    assert made is not None
    return made


def client_side(authority: Authority, identity: Path | None = None) -> ssl.SSLContext:
    return client_context(authority.ca, identity, None, None, verifies_host_name=True)


def broker_side(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.identity("broker"))
    return context
