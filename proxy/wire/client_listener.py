"""A listener for clients. A connection passes up to two steps before it is a client connection: PROXY header and TLS.

The connection counts from its accept, and both steps and the first request share one deadline. Each handshake uses the
current certificate. If a step fails, the listener logs one line that names the mistake. The listener logs a port check,
which sends nothing, at the level debug.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network

from protocol.errors import ProtocolError
from proxy.wire.admission import Admission, Limit, address_of
from proxy.wire.context import Address, ConnectionContext
from proxy.wire.error_log import IncidentKind
from proxy.wire.proxy_header import is_trusted, read_proxy_header
from proxy.wire.socket_transport import SocketTransport
from tiers.broker.tls import TlsContext, explain, is_plain_text

logger = logging.getLogger(__name__)

MakeProtocol = Callable[[Admission, Address | None], asyncio.BufferedProtocol]
"""Makes the protocol of a client connection from its place and the client's address."""

_ACCEPTS_AT_ONCE = 64
_RETRY_S = 1.0
"""The pause after a failed accept, for example if the process has no file descriptor left."""


class ClientListener:
    def __init__(
        self,
        listener: socket.socket,
        tls: TlsContext | None,
        proxy_networks: Sequence[IPv4Network | IPv6Network],
        make_protocol: MakeProtocol,
        context: ConnectionContext,
    ) -> None:
        """`proxy_networks`: the load balancers, whose PROXY header is mandatory. Empty: there is no such header."""
        self._listener = listener
        self._tls = tls
        self._proxy_networks = proxy_networks
        self._make_protocol = make_protocol
        self._context = context
        self._opening: dict[asyncio.Task[None], socket.socket | None] = {}
        """The socket, until the task's first step takes it over. A task that is cancelled before closes nothing."""
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stops listening and cancels the steps in progress. Established connections continue.

        Further calls have no effect."""
        if self._listener.fileno() < 0:
            return
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        """Accepts connections. This is a callback, because a task that is cancelled during accept loses its socket."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                peer, peername = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("clients' connections cannot be accepted, trying again: %s", error.strerror or error)
                self._loop.remove_reader(self._listener)
                self._again = self._loop.call_later(_RETRY_S, self._loop.add_reader, self._listener, self._accept)
                return
            peer.setblocking(False)
            self._begin(peer, peername)

    def _begin(self, peer: socket.socket, peername: object) -> None:
        client = (peername[0], peername[1]) if isinstance(peername, tuple) else None
        if self._proxy_networks and not is_trusted(address_of(peername), self._proxy_networks):
            self._refuse(peer, client, "listener.proxy.protocol.trusted.networks", "the address is no load balancer of")
            return
        opening = _Opening()
        admission = self._context.admissions.admit(address_of(peername), opening.give_way)
        if isinstance(admission, Limit):
            self._refuse(peer, client, admission, "the limit is reached:")
            return
        task = opening.task = self._context.spawn(self._open(peer, client, admission, opening))
        self._opening[task] = peer
        task.add_done_callback(lambda task: self._on_end(task, client, admission, opening))

    def _refuse(self, peer: socket.socket, client: Address | None, reason: str, said: str) -> None:
        self._context.metrics.rejected[reason] += 1
        self._log(logging.WARNING, reason, f"connection refused: {said} {reason}", "refused", client)
        peer.close()

    def _on_end(
        self, task: asyncio.Task[None], client: Address | None, admission: Admission, opening: _Opening
    ) -> None:
        if (peer := self._opening.pop(task)) is not None:
            peer.close()
            admission.give_back()
            self._gave_way(opening, client)

    async def _open(self, peer: socket.socket, client: Address | None, admission: Admission, opening: _Opening) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._opening[task] = None
        is_made = False
        protocol: asyncio.BufferedProtocol | None = None

        def make_protocol() -> asyncio.BufferedProtocol:
            nonlocal protocol
            protocol = self._make_protocol(admission, client)
            return protocol

        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._proxy_networks and (source := await read_proxy_header(peer)) is not None:
                client = source
                limit = admission.move(source[0])
                if limit is not None:
                    self._refuse(peer, client, limit, "the limit is reached:")
                    return
            if self._tls is None and self._context.pipes is not None:
                SocketTransport(peer, make_protocol(), self._context.pipes)
                is_made = True
                return
            await self._loop.connect_accepted_socket(
                make_protocol,
                peer,
                ssl=None if self._tls is None else self._tls.current(),
                # The place of the connection has the deadline.
                ssl_handshake_timeout=None if self._tls is None else self._context.admissions.setup_timeout_ms / 500,
            )
            is_made = True
        except ProtocolError as error:
            said = f"closing the connection: what the load balancer sent is refused: {error}"
            self._failed("proxy_header", logging.WARNING, said, client)
        except OSError as error:
            self._on_error(error, client)
        except asyncio.CancelledError:
            if opening.limit is None:
                raise
            self._gave_way(opening, client)  # nothing else was cancelled
        finally:
            if not is_made:
                admission.give_back()
                if protocol is not None:  # uvloop closes such a transport without a call of `connection_lost`
                    protocol.connection_lost(None)
                with contextlib.suppress(OSError):  # the transport has closed it, unless it had not begun
                    peer.shutdown(socket.SHUT_RDWR)
                peer.close()

    def _gave_way(self, opening: _Opening, client: Address | None) -> None:
        if opening.limit is not None:
            said = f"closing the connection: {opening.limit.said}"
            self._failed(opening.limit.cause, logging.WARNING, said, client)

    def _on_error(self, error: OSError, client: Address | None) -> None:
        if is_plain_text(error):
            said = "a client speaks plain text on this TLS port: set security.protocol=SSL (or SASL_SSL) in the client"
            self._failed("tls_handshake", logging.WARNING, said, client)
        elif isinstance(error, ssl.SSLError):
            said = f"a client failed the TLS handshake: {_fault_of(error)}"
            self._failed("tls_handshake", logging.WARNING, said, client)
        elif self._tls is not None:
            self._failed("tls_handshake", logging.DEBUG, f"a client left the TLS handshake: {explain(error)}", client)
        else:
            self._failed("client", logging.DEBUG, f"a client left: {explain(error)}", client)

    def _failed(self, cause: str, level: int, said: str, client: Address | None) -> None:
        self._context.metrics.closed[cause] += 1
        self._log(level, cause, said, "closed", client)

    def _log(self, level: int, reason: str, said: str, kind: IncidentKind, client: Address | None) -> None:
        peer = None if client is None else f"{client[0]}:{client[1]}"
        if self._context.log.log(level, reason, said, {"client": peer}) and level >= logging.WARNING:
            self._context.errors.note(kind, said, peer=peer)


class _Opening:
    """The task that takes a connection through its first steps, and the limit that ended it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.limit: Limit | None = None

    def give_way(self, limit: Limit) -> None:
        self.limit = limit
        if self.task is not None:
            self.task.cancel()


def _fault_of(error: ssl.SSLError) -> str:
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client sent no certificate, and client.auth of [listener.tls] requires one"
    if "ALERT" in (error.reason or ""):
        return (
            f"the client rejected the proxy, {explain(error)}: does it trust the authority of the proxy's certificate?"
        )
    return explain(error)
