"""Patches the broker's own Fetch responses: LogStartOffset of tiered partitions, and broker addresses.

`LocalAnswers` patches held responses, and `StreamedPartitions` those that are too large to hold. Both note the local
log's bounds that the responses tell. A topic that is not tiered costs one look-up for each response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from protocol.addresses import AddressOf, address_splices
from protocol.api_keys import ApiKey
from protocol.apis.fetch.response import UNKNOWN_OFFSET, FetchResponse, rebuild_response
from protocol.apis.fetch.stream import PartitionHead, PartitionPatch
from protocol.apis.topic_reference import TopicReference
from protocol.errors import ErrorCode
from protocol.primitives import Buffer
from protocol.splice import Splice
from protocol.steps import Steps
from proxy.cluster.local_log_bounds import Watermarks
from proxy.handlers.base import UNAVAILABLE, HandlerTools, is_of_internal_topic, named_partition
from proxy.handlers.fetch.held import FetchConnectionState
from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition


class LocalAnswers:
    def __init__(self, tools: HandlerTools) -> None:
        self._tools = tools

    def known_partition(self, topic: TopicReference, partition: int) -> TopicIdPartition | None:
        """Returns the partition with the topic id that the proxy knows. Does not wait.

        The id of a topic name may be that of a topic that was deleted since."""
        if isinstance(topic, UUID):
            return named_partition(self._tools, topic, partition)
        topic_id = self._tools.topology.topic_id(topic)
        return None if topic_id is None else TopicIdPartition(topic_id, partition, topic)

    def relay(self, response: FetchResponse, address_of: AddressOf) -> Steps[list[Buffer]]:
        """Returns the response with every partition as the broker answered it."""
        log_starts = yield from self.log_start_offsets(response)
        splices = yield from endpoint_splices(response, address_of)
        if not log_starts and not splices:
            return [response.payload]
        return (yield from rebuild_response.steps(response, log_start_offsets=log_starts, splices=splices))

    def log_start_offsets(self, response: FetchResponse) -> Steps[dict[int, int]]:
        """Returns the new log start offsets of tiered partitions without an error, by index in the response."""
        changed: dict[int, int] = {}
        topic: TopicReference | None = None
        is_tiered = False
        for index, entry in enumerate(response.partitions):
            yield
            if entry.error_code:
                continue
            if entry.topic != topic:
                topic = entry.topic
                self._tools.topology.use_topic(topic)
                is_tiered = self.is_tiered(topic)
            if not is_tiered:
                continue
            log_start = self.see(
                topic,
                entry.partition,
                entry.log_start_offset,
                Watermarks(entry.high_watermark, entry.last_stable_offset),
            )
            if log_start is not None and log_start != entry.log_start_offset:
                changed[index] = log_start
        return changed

    def see(self, topic: TopicReference, index: int, local_log_start: int, watermarks: Watermarks) -> int | None:
        """Notes the bounds that a response tells. Returns the log start of both tiers.

        None: the partition is not tiered, or the response tells no log start, or the metadata cannot be read."""
        partition = self.known_partition(topic, index)
        if partition is None:
            return None
        try:
            log_start = self._tools.log.remote(partition).earliest(max(local_log_start, 0))
        except RemoteLogError:
            return None
        if log_start is None:
            return None
        self._tools.bounds.see(partition, local_log_start, watermarks)
        return None if local_log_start < 0 else log_start

    def log_start(self, partition: TopicIdPartition) -> int:
        """Returns the log start for an answer with remote data; -1 when it is unknown. Raises `RemoteLogError`."""
        local_log_start = self._tools.bounds.expected_log_start(partition)
        if local_log_start is None:
            return UNKNOWN_OFFSET
        log_start = self._tools.log.remote(partition).earliest(local_log_start)
        return UNKNOWN_OFFSET if log_start is None else log_start

    def is_tiered(self, topic: TopicReference) -> bool:
        """Whether the topic is known to be tiered.

        False too while the metadata cannot be read: then the broker's log start offset stays unchanged."""
        partition = self.known_partition(topic, 0)
        try:
            return partition is not None and self._tools.metadata.state.is_tiered(partition.topic_id)
        except RemoteLogError:
            return False


def endpoint_splices(response: FetchResponse, address_of: AddressOf) -> Steps[Sequence[Splice]]:
    """Returns the splices that replace the addresses of leaders in a response."""
    if response.node_endpoints_bounds() is None:
        return ()
    return (yield from address_splices.steps(ApiKey.FETCH, response.version, response.payload, address_of))


class StreamedPartitions:
    """Patches a response that is too large to hold, without a change of length. Implements `PartitionPatches`.

    A streamed response cannot wait for anything, and nothing can be inserted into it. If the broker answered
    OFFSET_OUT_OF_RANGE for a tiered partition, the response says NONE without records. The client then asks again, and
    the proxy holds and serves that request. The session id of the response is sent already. Therefore the proxy refuses
    the session's next request, so that a full request follows (docs/design.md, "Fetch"). Calls `connection` to store
    state for the connection."""

    def __init__(
        self,
        tools: HandlerTools,
        local: LocalAnswers,
        connection: Callable[[], FetchConnectionState],
    ) -> None:
        self._tools = tools
        self._local = local
        self._connection = connection

    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        if head.error_code not in (ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE):
            return None
        self._tools.topology.use_topic(head.topic)
        if head.error_code == ErrorCode.NONE:
            watermarks = Watermarks(head.high_watermark, head.last_stable_offset)
            log_start = self._local.see(head.topic, head.partition, head.log_start_offset, watermarks)
            return None if log_start is None else PartitionPatch(log_start_offset=log_start)
        return self._out_of_range(head)

    def _out_of_range(self, head: PartitionHead) -> PartitionPatch | None:
        log = self._tools.log
        if is_of_internal_topic(self._tools, head.topic):
            return None
        partition = self._local.known_partition(head.topic, head.partition)
        if partition is None or not log.is_fresh(partition):
            return PartitionPatch(error_code=UNAVAILABLE)
        try:
            if not log.is_tiered(partition) and not self._tools.configured.may_be_tiered(partition.topic_id):
                return None
            end_offset = log.remote(partition).end()
            log_start = self._local.log_start(partition)
        except RemoteLogError:
            return PartitionPatch(error_code=UNAVAILABLE)
        # The offset is not known here. The next request is held, and judged.
        connection = self._connection()
        connection.authorized_topics.add(head.topic)
        connection.just_seen.add((head.topic, head.partition))
        connection.drops_session = True
        watermarks = self._tools.bounds.watermarks_above(partition, end_offset)
        return PartitionPatch(ErrorCode.NONE, watermarks.high_watermark, watermarks.last_stable_offset, log_start)
