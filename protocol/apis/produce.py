"""Produce (key 0): a peek at acks, since a request with acks=0 gets no response (semantics 1.4)."""

from __future__ import annotations

from protocol.api_keys import ApiKey, is_flexible
from protocol.errors import ProtocolError, TruncatedError
from protocol.header import parse_request_header
from protocol.primitives import Buffer, read_int16, read_string_bounds

_FIRST_VERSION_WITH_TRANSACTIONAL_ID = 3


def peek_acks(prefix: Buffer) -> int | None:
    """The acks of a Produce request of which `prefix` is the beginning of the payload, header included.

    None when the prefix ends before they do: more bytes are needed, and a whole payload is malformed.
    """
    try:
        api_key, api_version, _, _, pos = parse_request_header(prefix)
        if api_key != ApiKey.PRODUCE:
            raise ProtocolError(f"API key {api_key} where Produce was expected")
        if api_version >= _FIRST_VERSION_WITH_TRANSACTIONAL_ID:
            start, end = read_string_bounds(prefix, pos, is_flexible(api_key, api_version))
            pos = max(start, end)
        return read_int16(prefix, pos)[0]
    except TruncatedError:
        return None
