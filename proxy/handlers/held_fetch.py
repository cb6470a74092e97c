"""`HeldFetch`: a Fetch whose answer is collected before it leaves, since the remote tier may have a part in it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.apis.fetch_request import FetchRequest
from proxy.delayed_remote_fetch import RemotePartitionRead
from proxy.exchange import Exchange
from proxy.handlers.fetch_connections import PartitionKey
from proxy.hold_budget import Grant


@dataclass(slots=True)
class HeldFetch:
    """A request whose answer was held. `reads` began before the broker answered."""

    exchange: Exchange
    request: FetchRequest
    deadline_ms: int
    grant: Grant
    reads: dict[PartitionKey, RemotePartitionRead]
    is_sessionless: bool
    """It went upstream without a session, and with MaxWait 0."""
