"""Builds the answers that end waiting requests when the proxy drains: an empty Fetch, so that the consumer polls again.

Without such an answer, a long poll could outlast every drain timeout. The answer has no partitions, and a throttle time
of 1 ms: every client accepts an empty answer that reports throttling (docs/semantics.md 2.4, 2.5). Session id 0 makes
the client's next request, which another process receives, a full one.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocol.api_keys import ApiKey, is_flexible
from protocol.header import build_response_header
from protocol.primitives import EMPTY_TAGGED_SECTION, INT16, INT32, write_array_length
from proxy.wire.context import DrainAnswer
from proxy.wire.exchange import Buffers

_FIRST_VERSION_WITH_THROTTLE = 1
_FIRST_VERSION_WITH_SESSION = 7
_THROTTLE_MS = 1


def empty_fetch(api_version: int, correlation_id: int) -> Buffers:
    flexible = is_flexible(ApiKey.FETCH, api_version)
    body = INT32.pack(_THROTTLE_MS) if api_version >= _FIRST_VERSION_WITH_THROTTLE else b""
    if api_version >= _FIRST_VERSION_WITH_SESSION:
        body += INT16.pack(0) + INT32.pack(0)
    body += write_array_length(0, flexible)
    if flexible:
        body += EMPTY_TAGGED_SECTION
    return (build_response_header(ApiKey.FETCH, api_version, correlation_id), body)


DRAIN_ANSWERS: Mapping[int, DrainAnswer] = {ApiKey.FETCH: empty_fetch}
