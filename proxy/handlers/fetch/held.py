"""The state of a Fetch whose response is held, and of a connection between two Fetches.

The correctness of the next response does not depend on the state of a connection. If the handler forgets a connection,
it only loses the predictions. If it forgets that it must drop a session, the next OFFSET_OUT_OF_RANGE of the session
tells it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from protocol.apis.fetch.request import FetchRequest
from protocol.apis.fetch.response import FetchResponse, out_of_range
from protocol.apis.topic_reference import TopicReference
from proxy.handlers.fetch.delayed import RemotePartitionRead
from proxy.handlers.fetch.merge import Budget
from proxy.handlers.fetch.trace import FetchTrace
from proxy.wire.exchange import Exchange
from proxy.wire.memory import OVERSHOOT_BYTES, Grant
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteReadRequest

_GRACE_MS = 250
"""How long a response with local data may wait for the judgements of other partitions."""
_MAX_CONNECTIONS = 20_000

PartitionKey = tuple[TopicReference, int]


@dataclass(slots=True)
class HeldFetch:
    """A request whose response is held. `reads` are the remote reads that began before the broker answered."""

    exchange: Exchange
    request: FetchRequest
    deadline_ms: int
    """When the remote reads and judgements of the request end. They may outlive the answer, for the next request."""
    answer_at_ms: int
    """When the client gets an answer, whatever the remote tier has delivered until then.

    It may send other requests on the same connection, such as heartbeats, which wait behind this answer."""
    client_id: str
    """The client id of the request, which quotas use."""
    grant: Grant
    reads: dict[PartitionKey, RemotePartitionRead]
    is_sessionless: bool
    """Whether the request went upstream without a session and with MaxWait 0."""
    trace: FetchTrace | None
    """None: the request has no trace."""

    @property
    def max_wait_at_ms(self) -> int:
        return self.exchange.request.received_at_ms + self.request.max_wait_ms

    def read_request(self, partition: TopicIdPartition, offset: int, budget: Budget) -> RemoteReadRequest:
        """Returns the remote read of one of the request's partitions."""
        return RemoteReadRequest(
            partition,
            offset,
            budget.max_bytes,
            budget.min_one_message,
            self.request.isolation_level,
            self.deadline_ms,
            self.exchange.connection_id,
            self.client_id,
            "" if self.trace is None else self.trace.name,
        )


def answer_by_ms(held: HeldFetch, response: FetchResponse, now_ms: int) -> int:
    """Returns the time (ms) until which the response may wait for judgements of the partitions that the broker refused.

    A slow judgement must not delay the records of the other partitions."""
    if len(out_of_range(response)) == len(response.partitions):
        return held.answer_at_ms
    local_bytes = sum(entry.records_bytes for entry in response.partitions)
    has_enough = local_bytes >= max(1, held.request.min_bytes)
    soon_ms = now_ms + _GRACE_MS
    return min(held.answer_at_ms, soon_ms if has_enough else max(soon_ms, held.max_wait_at_ms))


@dataclass(slots=True)
class FetchConnectionState:
    authorized_topics: set[TopicReference] = field(default_factory=set)
    """The topics that the client may read, since the broker answered OFFSET_OUT_OF_RANGE for them on this connection.

    The broker checks the ACL before the range."""
    just_seen: set[PartitionKey] = field(default_factory=set)
    """The partitions that a streamed response could not serve. The response to the next request for one is held."""
    reads: dict[PartitionKey, RemotePartitionRead] = field(default_factory=dict)
    """The reads that were too slow for their response. They continue until the next request for the same partition."""
    drops_session: bool = False
    """Whether to answer the session's next request with FETCH_SESSION_ID_NOT_FOUND, so that a full request follows."""
    orphaned_session_id: int = 0
    """The session that the broker still keeps and the client does not know any more. The next full request closes it.

    0: no such session."""

    def keep(self, key: PartitionKey, read: RemotePartitionRead, grant: Grant) -> None:
        """Keeps a read for the next request. It counts as memory of the connection, as it did in its own request."""
        if (older := self.reads.get(key)) is not None:
            older.cancel()
        self.reads[key] = read
        size_bytes = read.request.max_bytes + (OVERSHOOT_BYTES if read.request.min_one_message else 0)
        read.linger(grant.keep(size_bytes), partial(self._forget, key, read))

    def take_over(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, RemotePartitionRead]:
        """Removes and returns the reads that were kept for these partitions."""
        taken = {key: self.reads.pop(key) for key in keys if key in self.reads}
        for read in taken.values():
            read.take_over()
        return taken

    def _forget(self, key: PartitionKey, read: RemotePartitionRead) -> None:
        """Cancels and removes a read that no later request took over."""
        if self.reads.get(key) is read:
            del self.reads[key]
            read.cancel()


class FetchConnectionStates:
    """The connections by id. Evicts the least recently used connection when there are too many."""

    def __init__(self, max_connections: int = _MAX_CONNECTIONS) -> None:
        self._connections: OrderedDict[int, FetchConnectionState] = OrderedDict()
        self._max_connections = max_connections

    def find(self, connection_id: int) -> FetchConnectionState | None:
        return self._connections.get(connection_id)

    def get(self, connection_id: int) -> FetchConnectionState:
        known = self._connections.get(connection_id)
        if known is None:
            known = self._connections[connection_id] = FetchConnectionState()
            if len(self._connections) > self._max_connections:
                self._connections.popitem(last=False)
        else:
            self._connections.move_to_end(connection_id)
        return known
