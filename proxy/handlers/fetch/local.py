"""Patches the broker's own Fetch responses: LogStartOffset of tiered partitions, and broker addresses.

It also notes the local log's bounds that the responses tell. A topic that is not tiered costs one look-up for each
response.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.addresses import address_splices
from protocol.api_keys import ApiKey
from protocol.apis.fetch.response import UNKNOWN_OFFSET, FetchResponse, rebuild_response
from protocol.apis.topic_reference import TopicReference
from protocol.primitives import Buffer
from protocol.splice import Splice
from proxy.cluster.local_log_bounds import Watermarks
from proxy.handlers.base import HandlerTools
from proxy.handlers.fetch.verdict import FetchJudge
from tiers.errors import RemoteLogError
from tiers.metadata.log_history import ConfirmedLogStart
from tiers.model.ids import TopicIdPartition


class LocalAnswers:
    def __init__(self, tools: HandlerTools, judge: FetchJudge) -> None:
        self._tools = tools
        self._judge = judge

    def relay(self, response: FetchResponse) -> list[Buffer]:
        """Returns the response with every partition as the broker answered it."""
        log_starts = self.log_start_offsets(response)
        splices = self.address_splices(response)
        if not log_starts and not splices:
            return [response.payload]
        return rebuild_response(response, log_start_offsets=log_starts, splices=splices)

    def log_start_offsets(self, response: FetchResponse) -> dict[int, int]:
        """Returns the new log start offsets of tiered partitions without an error, by index in the response."""
        changed: dict[int, int] = {}
        topic: TopicReference | None = None
        is_tiered = False
        for index, entry in enumerate(response.partitions):
            if entry.topic != topic:
                topic = entry.topic
                is_tiered = self.is_tiered(topic)
            if not is_tiered or entry.error_code:
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
        partition = self._judge.known_partition(topic, index)
        if partition is None:
            return None
        try:
            log_start = self._tools.tiered.earliest_readable(partition, max(local_log_start, 0))
        except RemoteLogError:
            return None
        if log_start is None:
            return None
        self._tools.bounds.see(partition, local_log_start, watermarks)
        return None if local_log_start < 0 else log_start

    def log_start(self, partition: TopicIdPartition, confirmed: ConfirmedLogStart | None = None) -> int:
        """Returns the log start for an answer with remote data; -1 when it is unknown. Raises `RemoteLogError`."""
        local_log_start = self._tools.bounds.expected_log_start(partition)
        if local_log_start is None:
            return UNKNOWN_OFFSET
        log_start = self._tools.tiered.earliest_readable(partition, local_log_start, confirmed)
        return UNKNOWN_OFFSET if log_start is None else log_start

    def address_splices(self, response: FetchResponse) -> Sequence[Splice]:
        if response.node_endpoints_bounds() is None:
            return ()
        advertised = self._tools.topology.advertised_address
        return address_splices(ApiKey.FETCH, response.version, response.payload, advertised)

    def is_tiered(self, topic: TopicReference) -> bool:
        """Whether the topic is known to be tiered.

        False too while the metadata cannot be read: then the broker's log start offset stays unchanged."""
        partition = self._judge.known_partition(topic, 0)
        try:
            return partition is not None and self._tools.tiered.rlmm.is_tiered(partition.topic_id)
        except RemoteLogError:
            return False
