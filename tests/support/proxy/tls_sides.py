"""TLS between clients, proxy and brokers: the contexts of each side, and who speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from proxy.listener_config import ListenerTlsConfig
from proxy.wire.tls import listener_tls
from tests.support.fakes.broker.wire import Wire
from tests.support.servers.certificates import Authority
from tests.support.servers.stream_server import StreamServer
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


class HangingTlsBroker(StreamServer):
    """Completes each TLS handshake, and then neither sends nor answers anything, not even the end of TLS."""

    def __init__(self, authority: Authority) -> None:
        super().__init__(self._shake_hands)
        self._context = broker_side(authority)
        self.ended = asyncio.Event()
        """The other side has closed a TCP connection."""

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._context.wrap_bio(arriving, leaving, server_side=True)
        is_complete = False
        with contextlib.suppress(ConnectionError):
            while not is_complete:
                try:
                    tls.do_handshake()
                    is_complete = True
                except ssl.SSLWantReadError:
                    pass
                writer.write(leaving.read())
                if not is_complete:
                    arriving.write(await reader.read(65_536) or arriving.read())
            await reader.read()
        self.ended.set()
