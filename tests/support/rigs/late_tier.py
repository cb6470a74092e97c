"""Repeats requests until both tiers have answered in time, as every client does.

On a busy machine a tier may be late. It then answers REPLICA_NOT_AVAILABLE, or without the records.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from protocol.apis.fetch.response import FetchResponse
from protocol.errors import ErrorCode
from tests.support.rigs.waiting import TIMEOUT_S
from tests.support.servers.peer import Peer

Answer = tuple[int, int, int, int, int]
"""An answer of ListOffsets: partition, error, timestamp, offset, leader epoch."""

_AGAIN_S = 0.05


def fetched(once: Callable[[], FetchResponse]) -> FetchResponse:
    """Repeats a Fetch of one partition. Returns the first answer with records, an error or a divergence."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        response = once()
        (one,) = response.partitions
        is_empty = not one.error_code and not one.records_bytes and response.diverging_epoch(one) is None
        if one.error_code != ErrorCode.REPLICA_NOT_AVAILABLE and not is_empty:
            return response
        assert time.monotonic() < deadline, "nothing comes"
        time.sleep(_AGAIN_S)


def listed(
    peer: Peer,
    version: int,
    topic: str,
    asked: list[tuple[int, int]],
    *,
    isolation_level: int = 0,
    current_leader_epoch: int = -1,
    replica_id: int = -1,
) -> list[Answer]:
    """Repeats `Peer.list_offsets` until no partition has an error that asks for a retry. Returns those answers."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        answers = peer.list_offsets(
            version,
            topic,
            asked,
            isolation_level=isolation_level,
            current_leader_epoch=current_leader_epoch,
            replica_id=replica_id,
        )
        if all(error != ErrorCode.REPLICA_NOT_AVAILABLE for _, error, *_ in answers):
            return answers
        assert time.monotonic() < deadline, answers
        time.sleep(_AGAIN_S)
