"""Request and response headers of every API and version (docs/semantics.md 1.1).

The proxy forwards a message by the first eight bytes of a request or the first four of a response. It reads the rest of
the header only when it reads the body. Client ids are never compact. The ApiVersions response header always has
version 0, so a client can read it whatever version the client asked for (KIP-511).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from protocol.api_keys import ApiKey, is_flexible
from protocol.errors import TruncatedError
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT32,
    Buffer,
    check_items,
    read_array_length,
    read_int16,
    read_string_bounds,
    skip_tagged_section,
    write_string,
)

_REQUEST_HEAD = struct.Struct(">hhi")


class RequestHead(NamedTuple):
    """The first eight bytes of a request payload."""

    api_key: int
    api_version: int
    correlation_id: int


class RequestHeader(NamedTuple):
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_position: int


def parse_request_head(frame: Buffer) -> RequestHead:
    """Reads the first eight bytes of a request payload. Does not check the API key or the version.

    Raises `TruncatedError` for a shorter payload.
    """
    try:
        return RequestHead._make(_REQUEST_HEAD.unpack_from(frame))
    except struct.error as error:
        raise TruncatedError(f"a request of {len(frame)} bytes is shorter than its header") from error


def parse_request_header(frame: Buffer) -> RequestHeader:
    """Reads the whole request header.

    Raises `ProtocolError` for an unknown API key as well, because the end of such a header is unknown.
    """
    api_key, api_version, correlation_id = parse_request_head(frame)
    body_position = request_body_position(api_key, api_version, frame)
    start, end = client_id_bounds(frame)
    # Brokers also replace bytes that are not UTF-8. The client id only serves logs and quotas.
    client_id = None if end < 0 else str(frame[start:end], "utf-8", "replace")
    return RequestHeader(api_key, api_version, correlation_id, client_id, body_position)


def client_id_bounds(frame: Buffer) -> tuple[int, int]:
    """Returns `(start, end)` of the client id in a request payload.

    For null it returns `(start, -1)`, where `start` is the position after the field. As for a broker, every negative
    length means null (docs/semantics.md 1.1)."""
    length, start = read_int16(frame, _REQUEST_HEAD.size)
    return (start, -1) if length < 0 else read_string_bounds(frame, _REQUEST_HEAD.size, compact=False)


def request_body_position(api_key: int, api_version: int, frame: Buffer) -> int:
    """Returns the position of the body in a request payload. Raises `ProtocolError` for an unknown API key."""
    flexible = is_flexible(api_key, api_version)
    start, end = client_id_bounds(frame)
    pos = start if end < 0 else end
    return skip_tagged_section(frame, pos) if flexible else pos


def response_header_version(api_key: int, api_version: int) -> int:
    return 1 if api_key != ApiKey.API_VERSIONS and is_flexible(api_key, api_version) else 0


def response_body_position(api_key: int, api_version: int, payload: Buffer) -> int:
    """Returns the position of the body in a response payload."""
    if len(payload) < INT32.size:
        raise TruncatedError(f"a response of {len(payload)} bytes is shorter than its header")
    if response_header_version(api_key, api_version) == 0:
        return INT32.size
    return skip_tagged_section(payload, INT32.size)


def build_request_header(api_key: int, api_version: int, correlation_id: int, client_id: str | None) -> bytes:
    header = _REQUEST_HEAD.pack(api_key, api_version, correlation_id) + write_string(client_id, compact=False)
    return header + EMPTY_TAGGED_SECTION if is_flexible(api_key, api_version) else header


def build_response_header(api_key: int, api_version: int, correlation_id: int) -> bytes:
    header = INT32.pack(correlation_id)
    return header + EMPTY_TAGGED_SECTION if response_header_version(api_key, api_version) else header


def check_first_array(frame: Buffer) -> None:
    """Checks the number of elements of a request whose body begins with an array, before any is visited.

    Raises `ProtocolError`."""
    api_key, version, _, _, pos = parse_request_header(frame)
    check_items(read_array_length(frame, pos, is_flexible(api_key, version))[0])
