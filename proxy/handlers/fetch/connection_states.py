"""The state that the Fetch handler keeps for a connection between two requests.

The correctness of the next response does not depend on this state. If the handler forgets a connection, it only loses
the predictions. If it forgets that it must drop a session, the next OFFSET_OUT_OF_RANGE of the session tells it again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from protocol.apis.topic_reference import TopicReference
from proxy.handlers.fetch.delayed import RemotePartitionRead

_MAX_CONNECTIONS = 20_000

PartitionKey = tuple[TopicReference, int]


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

    def forget(self, key: PartitionKey, read: RemotePartitionRead) -> None:
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
