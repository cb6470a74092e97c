"""A listener for TLS. Each handshake uses the current certificate, and becomes a client connection when it succeeds.

A handshake counts as a connection and has a deadline. If it fails, the listener logs one line that names the mistake.
The listener logs a port check, which sends nothing, at the level debug.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine

from proxy.config import LimitsConfig
from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admission, Admissions, address_of
from tiers.broker.tls import TlsContext, explain, is_plain_text

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
"""The pause after a failed accept, for example if the process has no file descriptor left."""


class TlsListener:
    def __init__(
        self,
        listener: socket.socket,
        tls: TlsContext,
        make_protocol: Callable[[Admission], asyncio.BaseProtocol],
        admissions: Admissions,
        limits: LimitsConfig,
        metrics: ProxyMetrics,
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._make_protocol = make_protocol
        self._admissions = admissions
        self._limits = limits
        self._metrics = metrics
        self._spawn = spawn
        self._handshakes: dict[asyncio.Task[None], socket.socket | None] = {}
        """The socket, until the task's first step takes it over. A task that is cancelled before closes nothing."""
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stops listening and cancels handshakes. Established connections continue. Further calls have no effect."""
        if self._listener.fileno() < 0:
            return
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._handshakes:
            task.cancel()

    def _accept(self) -> None:
        """Accepts a connection. This is a callback, because a task that is cancelled during accept loses its socket."""
        try:
            peer, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.error("clients' connections cannot be accepted, trying again: %s", error.strerror or error)
            self._loop.remove_reader(self._listener)
            self._again = self._loop.call_later(_RETRY_S, self._loop.add_reader, self._listener, self._accept)
            return
        peer.setblocking(False)
        task = self._spawn(self._shake_hands(peer, address))
        self._handshakes[task] = peer
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if (peer := self._handshakes.pop(task)) is not None:
            peer.close()

    async def _shake_hands(self, peer: socket.socket, address: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handshakes[task] = None
        who = {"client": f"{address[0]}:{address[1]}" if isinstance(address, tuple) else None}
        admission = self._admissions.admit(address_of(address))
        if isinstance(admission, str):
            self._metrics.rejected_connections += 1
            logger.warning("connection refused: the limit %s is reached", admission, extra=who)
            peer.close()
            return
        is_made = False
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(admission),
                peer,
                ssl=self._tls.current(),
                ssl_handshake_timeout=self._limits.handshake_timeout_ms / 1000,
            )
            is_made = True
        except OSError as error:
            self._metrics.closed["tls_handshake"] += 1
            if is_plain_text(error):
                logger.warning(
                    "a client speaks plain text on this TLS port: set security.protocol=SSL (or SASL_SSL) "
                    "in the client",
                    extra=who,
                )
            elif isinstance(error, ssl.SSLError):
                logger.warning("a client failed the TLS handshake: %s", _fault_of(error), extra=who)
            else:
                logger.debug("a client left the TLS handshake: %s", explain(error), extra=who)
        finally:
            if not is_made:
                admission.give_back()
                with contextlib.suppress(OSError):  # the transport has closed it, unless it had not begun
                    peer.shutdown(socket.SHUT_RDWR)


def _fault_of(error: ssl.SSLError) -> str:
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client sent no certificate, and client.auth of [listener.tls] requires one"
    if "ALERT" in (error.reason or ""):
        return (
            f"the client rejected the proxy, {explain(error)}: does it trust the authority of the proxy's certificate?"
        )
    return explain(error)
