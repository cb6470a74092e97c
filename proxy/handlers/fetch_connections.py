"""What the Fetch handler remembers of a connection between two requests.

Nothing here is needed for correctness of the next answer: a forgotten connection only loses its predictions, and a
session that was to be dropped shows itself again by the next OFFSET_OUT_OF_RANGE.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from protocol.apis.topic_reference import TopicReference
from proxy.delayed_remote_fetch import RemotePartitionRead

_MAX_CONNECTIONS = 20_000

PartitionKey = tuple[TopicReference, int]


@dataclass(slots=True)
class FetchConnection:
    authorized_topics: set[TopicReference] = field(default_factory=set)
    """The broker answered OFFSET_OUT_OF_RANGE for them on this connection, and it checks the ACL before the range."""
    just_seen: set[PartitionKey] = field(default_factory=set)
    """Partitions that a streamed answer could not serve: the next request that names one is held."""
    reads: dict[PartitionKey, RemotePartitionRead] = field(default_factory=dict)
    """Begun for an answer that could not wait for them: they go on until the next request for the same."""
    drops_session: bool = False
    """The next request of the client's session is answered FETCH_SESSION_ID_NOT_FOUND: a full one follows."""
    orphaned_session_id: int = 0
    """The broker still keeps this session, the client does not know of it any more: the next full request closes it."""

    def forget(self, key: PartitionKey, read: RemotePartitionRead) -> None:
        """Nobody came for it."""
        if self.reads.get(key) is read:
            del self.reads[key]
            read.cancel()


class FetchConnections:
    """By connection id, least recently used ones forgotten."""

    def __init__(self, max_connections: int = _MAX_CONNECTIONS) -> None:
        self._connections: OrderedDict[int, FetchConnection] = OrderedDict()
        self._max_connections = max_connections

    def find(self, connection_id: int) -> FetchConnection | None:
        return self._connections.get(connection_id)

    def get(self, connection_id: int) -> FetchConnection:
        known = self._connections.get(connection_id)
        if known is None:
            known = self._connections[connection_id] = FetchConnection()
            if len(self._connections) > self._max_connections:
                self._connections.popitem(last=False)
        else:
            self._connections.move_to_end(connection_id)
        return known
