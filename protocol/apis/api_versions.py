"""ApiVersions (key 18): limits the broker's answer to the APIs and versions that the proxy supports.

See docs/semantics.md 1.3.

The response header has version 0 in every version of the API. A broker that does not know the requested version answers
with a body of version 0. This module removes or narrows entries in place, so features, tags and all other entries stay
verbatim.
"""

from __future__ import annotations

import struct

from protocol.api_keys import DECODED_APIS, ApiKey, VersionRange, supported_versions
from protocol.errors import ErrorCode, ProtocolError, TruncatedError
from protocol.header import build_response_header, response_body_position
from protocol.primitives import (
    Buffer,
    read_array_length,
    read_int16,
    skip_tagged_section,
    write_array_length,
)
from protocol.schema import compile_message
from protocol.splice import Splice, splice

_ENTRY = struct.Struct(">hhh")
_VERSION_0 = 0


def intersect_api_versions(payload: Buffer, api_version: int) -> bytes:
    """Returns the broker's response payload, limited to the APIs and versions that a client may use.

    The result offers no version that the broker does not offer, and omits hidden and unknown keys. Produce keeps the
    minimum version 0, which brokers advertise although they refuse it (KAFKA-18659).
    """
    pos = response_body_position(ApiKey.API_VERSIONS, api_version, payload)
    error_code, array_at = read_int16(payload, pos)
    if error_code == ErrorCode.UNSUPPORTED_VERSION:
        api_version = _VERSION_0
    plan = compile_message(ApiKey.API_VERSIONS, api_version, "Response")
    flexible = plan.is_flexible
    count, pos = read_array_length(payload, array_at, flexible)
    if count < 0:
        raise ProtocolError("the ApiVersions response has null for its array of keys")
    entries_at = pos
    kept = 0
    splices: list[Splice] = []
    for _ in range(count):
        start = pos
        if start + _ENTRY.size > len(payload):
            raise TruncatedError(f"an ApiVersions entry at {start} exceeds the response of {len(payload)} bytes")
        api_key, min_version, max_version = _ENTRY.unpack_from(payload, start)
        pos = start + _ENTRY.size
        if flexible:
            pos = skip_tagged_section(payload, pos)
        versions = _intersect(api_key, min_version, max_version)
        if versions is None:
            splices.append(Splice(start, pos, b""))
            continue
        kept += 1
        if versions != (min_version, max_version):
            splices.append(Splice(start, start + _ENTRY.size, _ENTRY.pack(api_key, *versions)))
    return splice(payload, [Splice(array_at, entries_at, write_array_length(kept, flexible)), *splices])


def _intersect(api_key: int, min_version: int, max_version: int) -> VersionRange | None:
    ours = supported_versions(api_key)
    if ours is None:
        return None
    both = VersionRange(max(min_version, ours.min_version), min(max_version, ours.max_version))
    return both if both.min_version <= both.max_version else None


def unsupported_version_response(correlation_id: int) -> bytes:
    """Returns the answer to an ApiVersions request of a version that the proxy does not support.

    It does not need the body of that request, whose format is unknown.
    """
    ours = DECODED_APIS[ApiKey.API_VERSIONS]
    return b"".join(
        (
            build_response_header(ApiKey.API_VERSIONS, _VERSION_0, correlation_id),
            struct.pack(">h", ErrorCode.UNSUPPORTED_VERSION),
            write_array_length(1, compact=False),
            _ENTRY.pack(ApiKey.API_VERSIONS, *ours),
        )
    )
