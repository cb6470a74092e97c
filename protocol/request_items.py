"""Limits the items of a request that is decoded, so that one request takes a short time, whatever its bytes are.

An item is an element of an array that the decoder visits: a topic, a partition, a resource, a setting or a group.
"""

from __future__ import annotations

from typing import Final

from protocol.api_keys import is_flexible
from protocol.errors import LimitExceededError
from protocol.header import parse_request_header
from protocol.primitives import Buffer, read_array_length

MAX_ITEMS: Final = 50_000
"""The most items of a request.

`kafka-topics.sh --describe` asks for the settings of all topics in one request. MirrorMaker changes every setting of
every topic in one request, which is about 35 items for a topic."""


def check_items(count: int, limit: int = MAX_ITEMS) -> None:
    if count > limit:
        raise LimitExceededError(f"a request with {count} items or more, above the limit of {limit}")


def check_first_array(frame: Buffer) -> None:
    """Checks the number of elements of a request whose body begins with an array, before any is visited.

    Raises `ProtocolError`."""
    api_key, version, _, _, pos = parse_request_header(frame)
    check_items(read_array_length(frame, pos, is_flexible(api_key, version))[0])
