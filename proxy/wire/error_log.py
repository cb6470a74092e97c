"""`ErrorLog`: the last undecodable frames, and the last connections that were closed, refused or throttled.

The admin port shows it at `/errors` and `/api/v1/errors`. A dump of a request shows its header, and the body of those
APIs whose messages have neither records nor secrets. It shows them only if the bytes are a request for sure: a frame
that begins at the wrong place may have records or a password at any place. All other bytes are masked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.errors import ProtocolError
from protocol.frame import RESPONSE_HEAD_BYTES
from protocol.header import parse_request_header
from protocol.primitives import Buffer
from proxy.logging_setup import loggable

IncidentKind = Literal["undecodable", "closed", "refused", "throttled"]
Sender = Literal["client", "broker"]

MAX_INCIDENTS = 100
MAX_DUMP_BYTES = 256
_BYTES_PER_LINE = 16
_MASKED = "**"

_OPEN_REQUESTS = frozenset(
    {
        ApiKey.API_VERSIONS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.DELETE_RECORDS,
        ApiKey.DELETE_TOPICS,
        ApiKey.DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.FETCH,
        ApiKey.FIND_COORDINATOR,
        ApiKey.LIST_OFFSETS,
        ApiKey.METADATA,
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
    }
)
"""The APIs whose requests have no records, no values of settings and no secrets."""
_OPEN_RESPONSES = _OPEN_REQUESTS - {ApiKey.FETCH, ApiKey.DESCRIBE_CONFIGS}
"""The APIs whose responses have none either."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One entry. `position` is that of the faulty field in the frame's payload. `dump` has one text per 16 bytes."""

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
    dump: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultyFrame:
    """The part of a frame's payload that has arrived. For a response, the API is that of its request."""

    sender: Sender
    payload: Buffer
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
        dump: tuple[str, ...] = ()
        if frame is not None:
            api_key, api_version, found, dump = _described(frame, client_id)
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
                dump,
            )
        )


def _api_name(api_key: int | None) -> str | None:
    if api_key is None:
        return None
    try:
        return ApiKey(api_key).name
    except ValueError:
        return str(api_key)


def _described(frame: FaultyFrame, client_id: str | None) -> tuple[int | None, int | None, str | None, tuple[str, ...]]:
    """Returns the API key, the API version, the client id and the masked dump."""
    data, size = frame.payload, len(frame.payload)
    if frame.sender == "broker":
        shown = size if frame.api_key in _OPEN_RESPONSES else RESPONSE_HEAD_BYTES
        return frame.api_key, frame.api_version, None, _dump(data, shown)
    try:
        header = parse_request_header(data)
    except ProtocolError:
        return None, None, None, _dump(data, 0)
    # The first request of a connection begins where the connection begins. Each later one has the same client id.
    if header.api_key not in DECODED_APIS or (client_id is not None and header.client_id != client_id):
        return None, None, None, _dump(data, 0)
    shown = size if header.api_key in _OPEN_REQUESTS else header.body_position
    return header.api_key, header.api_version, header.client_id, _dump(data, shown)


def _dump(data: Buffer, shown: int) -> tuple[str, ...]:
    """The bytes from `shown` on are masked."""
    size = len(data)
    shown = min(shown, size, MAX_DUMP_BYTES)
    # Masked bytes have no content to show: one line of them is enough to tell where they begin.
    end = min(size, MAX_DUMP_BYTES, shown + (-shown % _BYTES_PER_LINE) + _BYTES_PER_LINE)
    lines = []
    for start in range(0, end, _BYTES_PER_LINE):
        places = range(start, min(start + _BYTES_PER_LINE, end))
        digits = " ".join(f"{data[place]:02x}" if place < shown else _MASKED for place in places)
        text = "".join(_printable(data[place]) if place < shown else "*" for place in places)
        lines.append(f"{start:08x}  {digits:<{3 * _BYTES_PER_LINE - 1}}  |{text}|")
    if size > end:
        lines.append(f"{end:08x}  and {size - end} more bytes")
    return tuple(lines)


def _printable(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F else "."
