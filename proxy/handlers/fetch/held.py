"""`HeldFetch`: a Fetch whose response is held, because the remote tier may contribute to it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.apis.fetch.request import FetchRequest
from protocol.apis.fetch.response import FetchResponse, out_of_range
from proxy.handlers.fetch.connection_states import PartitionKey
from proxy.handlers.fetch.delayed import RemotePartitionRead
from proxy.wire.exchange import Exchange
from proxy.wire.hold_budget import Grant

_GRACE_MS = 250
"""How long a response with local data may wait for the judgements of other partitions."""


@dataclass(slots=True)
class HeldFetch:
    """A request whose response is held. `reads` are the remote reads that began before the broker answered."""

    exchange: Exchange
    request: FetchRequest
    deadline_ms: int
    grant: Grant
    reads: dict[PartitionKey, RemotePartitionRead]
    is_sessionless: bool
    """Whether the request went upstream without a session and with MaxWait 0."""


def answer_by_ms(held: HeldFetch, response: FetchResponse, now_ms: int) -> int:
    """Returns the time (ms) until which the response may wait for judgements of the partitions that the broker refused.

    A slow judgement must not delay the records of the other partitions."""
    if len(out_of_range(response)) == len(response.partitions):
        return held.deadline_ms
    local_bytes = sum(entry.records_bytes for entry in response.partitions)
    has_enough = local_bytes >= max(1, held.request.min_bytes)
    max_wait_at_ms = held.exchange.request.received_at_ms + held.request.max_wait_ms
    soon_ms = now_ms + _GRACE_MS
    return min(held.deadline_ms, soon_ms if has_enough else max(soon_ms, max_wait_at_ms))
