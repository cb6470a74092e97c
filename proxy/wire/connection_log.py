"""What operators hear of connections: `ConnectionLog` bounds the number of lines, `ConnectionReport` has the words.

A hostile client decides how often this happens. So each reason has some lines per minute. The next line of the reason
says how many were left out, and the metrics count all of them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from protocol.addresses import Address
from protocol.errors import HttpError, ProtocolError, TlsHandshakeError
from proxy.wire.error_log import ErrorLog, FaultyFrame, IncidentKind, Sender

logger = logging.getLogger(__name__)

LINES = 20
WINDOW_MS = 60_000


@dataclass(slots=True)
class _Window:
    began_at_ms: int
    lines: int = 0
    left_out: int = 0


class ConnectionLog:
    def __init__(self, logger: logging.Logger, clock_ms: Callable[[], int]) -> None:
        self._logger = logger
        self._clock_ms = clock_ms
        self._windows = defaultdict[str, _Window](lambda: _Window(clock_ms()))

    def log(self, level: int, reason: str, message: str, who: Mapping[str, object]) -> bool:
        """Returns whether the line was not left out.

        `reason` is one of few. `message` says what happened, and `who` names the connection."""
        fields = self.fields_of_next(reason, who)
        if fields is None:
            return False
        self._logger.log(level, message, extra=fields)
        return True

    def fields_of_next(self, reason: str, who: Mapping[str, object]) -> Mapping[str, object] | None:
        """Counts a line of this reason, and returns its fields. None: the line must be left out."""
        window = self._windows[reason]
        now_ms = self._clock_ms()
        if now_ms - window.began_at_ms >= WINDOW_MS:
            window.began_at_ms, window.lines = now_ms, 0
        if window.lines >= LINES:
            window.left_out += 1
            return None
        window.lines += 1
        left_out, window.left_out = window.left_out, 0
        return {**who, "lines_left_out": left_out} if left_out else who


class Reported(Protocol):
    """The connection that a report is about."""

    @property
    def connection_id(self) -> int: ...

    @property
    def node_id(self) -> int | None: ...

    @property
    def client_id(self) -> str | None: ...


class ConnectionReport:
    """Tells operators about one connection, in the log and on the page. `client` is the client's own address."""

    __slots__ = ("_connection", "_errors", "_log", "_peer")

    def __init__(self, log: ConnectionLog, errors: ErrorLog, connection: Reported, client: Address | None) -> None:
        self._log = log
        self._errors = errors
        self._connection = connection
        self._peer = None if client is None else f"{client[0]}:{client[1]}"

    def log(self, level: int, reason: str, message: str) -> bool:
        """Writes the line to the log alone. Returns whether it was not left out."""
        return self._log.log(level, reason, message, self._who())

    def tell(self, reason: str, said: str) -> None:
        """Tells why the connection closes."""
        if self.log(logging.WARNING, reason, said):
            self._note("closed", said)

    def failed(self, peer: Sender, error: Exception, frame: FaultyFrame | None) -> None:
        """`peer` is the sender of the faulty bytes. `frame` is the one that cannot be decoded, if there is one."""
        match error:
            case TlsHandshakeError() if peer == "broker":
                said = "closing the connection: the broker speaks TLS: set [upstream.tls]"
            case TlsHandshakeError():
                said = (
                    "a client speaks TLS on this plain-text port: set security.protocol=PLAINTEXT (or SASL_PLAINTEXT) "
                    "in the client, or give the proxy a certificate ([listener.tls])"
                )
            case HttpError() if peer == "broker":
                said = "closing the connection: the broker speaks HTTP: does bootstrap.servers name Kafka's ports?"
            case HttpError():
                said = (
                    "a client speaks HTTP on this port for Kafka's clients: the port of [admin] has metrics and health"
                )
            case ProtocolError():
                said = f"closing the connection: what the {peer} sent is refused: {error}"
            case _:
                fields = self._log.fields_of_next("handler_error", self._who())
                if fields is not None:
                    logger.error("closing the connection: a request handler failed", exc_info=error, extra=fields)
                # The text of such an error may have anything in it.
                self._note("closed", f"a request handler failed: {type(error).__name__}")
                return
        self.log(logging.WARNING, "protocol_error", said)
        self._note("undecodable", error, frame)

    def _note(self, kind: IncidentKind, reason: str | Exception, frame: FaultyFrame | None = None) -> None:
        node_id, client_id = self._connection.node_id, self._connection.client_id
        self._errors.note(kind, reason, peer=self._peer, node_id=node_id, client_id=client_id, frame=frame)

    def _who(self) -> dict[str, object]:
        return {
            "connection_id": self._connection.connection_id,
            "node_id": self._connection.node_id,
            "client": self._peer,
            "client_id": self._connection.client_id,
        }
