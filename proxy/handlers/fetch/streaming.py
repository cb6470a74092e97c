"""`StreamedPartitions` patches a Fetch response that is too large to hold, without a change of length.

A streamed response cannot wait for anything, and nothing can be inserted into it. If the broker answered
OFFSET_OUT_OF_RANGE for a tiered partition, the response says NONE without records. The client then asks again, and the
proxy holds and serves that request. The session id of the response is sent already. Therefore the proxy refuses the
session's next request, so that a full request follows (docs/design.md, "Fetch").
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.apis.fetch.stream import PartitionHead, PartitionPatch
from protocol.errors import ErrorCode
from proxy.cluster.local_log_bounds import Watermarks
from proxy.error_map import UNAVAILABLE
from proxy.handlers.base import HandlerTools
from proxy.handlers.fetch.connection_states import FetchConnectionState
from proxy.handlers.fetch.local import LocalAnswers
from proxy.handlers.fetch.verdict import FetchJudge
from tiers.errors import RemoteLogError


class StreamedPartitions:
    """Implements `PartitionPatches` for one response. Calls `connection` to store state for the connection."""

    def __init__(
        self,
        tools: HandlerTools,
        judge: FetchJudge,
        local: LocalAnswers,
        connection: Callable[[], FetchConnectionState],
    ) -> None:
        self._tools = tools
        self._judge = judge
        self._local = local
        self._connection = connection

    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        if head.error_code == ErrorCode.NONE:
            watermarks = Watermarks(head.high_watermark, head.last_stable_offset)
            log_start = self._local.see(head.topic, head.partition, head.log_start_offset, watermarks)
            return None if log_start is None else PartitionPatch(log_start_offset=log_start)
        if head.error_code != ErrorCode.OFFSET_OUT_OF_RANGE:
            return None
        return self._out_of_range(head)

    def _out_of_range(self, head: PartitionHead) -> PartitionPatch | None:
        tiered = self._tools.tiered
        partition = self._judge.known_partition(head.topic, head.partition)
        if partition is None or not tiered.is_fresh(partition):
            return PartitionPatch(error_code=UNAVAILABLE)
        try:
            if not tiered.is_tiered(partition) and not self._tools.configured.may_be_tiered(partition.topic_id):
                return None
            end_offset = tiered.end_offset(partition)
            log_start = self._local.log_start(partition)
        except RemoteLogError:
            return PartitionPatch(error_code=UNAVAILABLE)
        # Only the leader knows whether it confirms a log start above the offset. The next request is held to ask it.
        connection = self._connection()
        connection.authorized_topics.add(head.topic)
        connection.just_seen.add((head.topic, head.partition))
        connection.drops_session = True
        watermarks = self._tools.bounds.watermarks_above(partition, end_offset)
        return PartitionPatch(ErrorCode.NONE, watermarks.high_watermark, watermarks.last_stable_offset, log_start)
