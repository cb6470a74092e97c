"""The listener itself; what its clients see is in `test_tls.py` and `test_tls_limits.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path

from proxy.limits_config import ConnectionLimits
from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admissions
from proxy.wire.server import bind
from proxy.wire.tls_listener import TlsListener
from tests.support.proxy.tls_sides import for_clients
from tests.support.servers.certificates import Authority
from tests.support.servers.ports import free_ports
from tests.support.servers.stream_server import StreamServer


async def test_a_listener_may_be_closed_again(tmp_path: Path) -> None:
    def spawn(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        raise AssertionError("nobody has connected")

    (port,) = free_ports(1)
    bound = bind("127.0.0.1", port, reuse_port=False)
    tls = for_clients(Authority(tmp_path))
    listener = TlsListener(
        bound, tls, lambda _: asyncio.Protocol(), Admissions(1, 1), ConnectionLimits(), ProxyMetrics(), spawn
    )
    listener.close()
    # Whoever has the descriptor's number next is not the second close's to touch.
    accepted = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        accepted.set()

    async with StreamServer(accept, port=port):
        listener.close()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await accepted.wait()
        writer.close()
        await writer.wait_closed()
