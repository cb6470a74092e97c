"""`ErrorLog`: the last undecodable frames, and the last connections that were closed, refused or throttled.

The admin port shows it at `/errors` and `/api/v1/errors`. An entry has the API and the client id of a frame, and no
other bytes of it: a frame that begins at the wrong place may have records or a password at any place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.errors import ProtocolError
from protocol.header import parse_request_header
from protocol.primitives import Buffer
from proxy.logging_setup import loggable

IncidentKind = Literal["undecodable", "closed", "refused", "throttled"]
Sender = Literal["client", "broker"]

MAX_INCIDENTS = 100


@dataclass(frozen=True, slots=True)
class Incident:
    """One entry. `position` is that of the faulty field in the frame's payload."""

    time_ms: int
    kind: IncidentKind
    reason: str
    peer: str | None
    node_id: int | None
    client_id: str | None
    sender: Sender | None
    api: str | None
    api_version: int | None
    position: int | None


@dataclass(frozen=True, slots=True)
class FaultyFrame:
    """A frame that cannot be decoded. `request` is the part of a client's frame that has arrived.

    A response has the API of its request."""

    sender: Sender
    request: Buffer = b""
    api_key: int | None = None
    api_version: int | None = None


class ErrorLog:
    """The ring of one process. `wall_clock_ms` gives the times of its entries."""

    def __init__(
        self, max_incidents: int = MAX_INCIDENTS, wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._incidents: deque[Incident] = deque(maxlen=max_incidents)
        self._wall_clock_ms = wall_clock_ms

    @property
    def incidents(self) -> list[Incident]:
        """The entries, the oldest first."""
        return list(self._incidents)

    def note(
        self,
        kind: IncidentKind,
        reason: str | Exception,
        *,
        peer: str | None,
        node_id: int | None = None,
        client_id: str | None = None,
        frame: FaultyFrame | None = None,
    ) -> None:
        """Adds an entry, and forgets the oldest one of a full ring. Keeps no reference to the frame's bytes.

        `peer` is the client's address, also if a broker sent the frame. `client_id` is that of the connection's
        earlier requests, if there is one."""
        api_key = api_version = None
        if frame is not None:
            api_key, api_version, found = _described(frame, client_id)
            client_id = client_id or found
        self._incidents.append(
            Incident(
                self._wall_clock_ms(),
                kind,
                loggable(str(reason)),
                peer,
                node_id,
                None if client_id is None else loggable(client_id),
                None if frame is None else frame.sender,
                _api_name(api_key),
                api_version,
                reason.position if isinstance(reason, ProtocolError) else None,
            )
        )


def _api_name(api_key: int | None) -> str | None:
    if api_key is None:
        return None
    try:
        return ApiKey(api_key).name
    except ValueError:
        return str(api_key)


def _described(frame: FaultyFrame, client_id: str | None) -> tuple[int | None, int | None, str | None]:
    """Returns the API key, the API version and the client id, if the bytes are a request or a response for sure."""
    if frame.sender == "broker":
        return frame.api_key, frame.api_version, None
    try:
        header = parse_request_header(frame.request)
    except ProtocolError:
        return None, None, None
    # The first request of a connection begins where the connection begins. Each later one has the same client id.
    if header.api_key not in DECODED_APIS or (client_id is not None and header.client_id != client_id):
        return None, None, None
    return header.api_key, header.api_version, header.client_id
