"""Reads the acks of a Produce request (key 0), because a request with acks=0 gets no response.

See docs/semantics.md 1.4.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey, is_flexible
from protocol.errors import ProtocolError, TruncatedError
from protocol.header import parse_request_header
from protocol.primitives import Buffer, read_int16, read_string_bounds

_FIRST_VERSION_WITH_TRANSACTIONAL_ID = 3


def peek_acks(prefix: Buffer) -> int | None:
    """Returns the acks of a Produce request whose payload, header included, begins with `prefix`.

    Returns None when `prefix` ends before the end of the acks. The caller then needs more bytes; if `prefix` is the
    whole payload, the request is malformed. Raises `ProtocolError` for another API or malformed bytes.
    """
    try:
        api_key, api_version, _, _, pos = parse_request_header(prefix)
        if api_key != ApiKey.PRODUCE:
            raise ProtocolError(f"expected Produce, but the request has API key {api_key}")
        if api_version >= _FIRST_VERSION_WITH_TRANSACTIONAL_ID:
            start, end = read_string_bounds(prefix, pos, is_flexible(api_key, api_version))
            pos = max(start, end)
        return read_int16(prefix, pos)[0]
    except TruncatedError:
        return None
