"""What a request that waits is answered when the proxy drains: an empty Fetch, so that the consumer simply asks again.

A long poll outlives every drain timeout otherwise. The answer names no partitions and a throttle time of 1 ms: an empty
answer that says it was throttled is the one that every client takes for a good one (semantics 2.4, 2.5), and session id
0 makes the next request, to whoever takes over, a full one.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocol.api_keys import ApiKey, is_flexible
from protocol.header import build_response_header
from protocol.primitives import EMPTY_TAGGED_SECTION, INT16, INT32, write_array_length
from proxy.context import EarlyAnswer
from proxy.exchange import Buffers

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


EARLY_ANSWERS: Mapping[int, EarlyAnswer] = {ApiKey.FETCH: empty_fetch}
