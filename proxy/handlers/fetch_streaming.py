"""`StreamedPartitions`: what is patched, by equal length, in a Fetch answer too large to hold.

Nothing can be waited for here, and nothing can be inserted. A tiered partition that the broker answered
OFFSET_OUT_OF_RANGE becomes NONE without records: the client asks again, and that request is held and served. Since the
session id has left already, the next request of the session is refused, so that a full one follows (DESIGN "Flow 1").
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.apis.fetch_stream import PartitionHead, PartitionPatch
from protocol.errors import ErrorCode
from proxy.error_map import UNAVAILABLE
from proxy.handlers.base import HandlerTools
from proxy.handlers.fetch_connections import FetchConnection
from proxy.handlers.fetch_local import LocalAnswers
from proxy.handlers.fetch_verdict import FetchJudge
from proxy.local_log_bounds import Watermarks
from tiers.errors import RemoteLogError


class StreamedPartitions:
    """Implements `PartitionPatches` for one response; `connection` is called when something must be remembered."""

    def __init__(
        self,
        tools: HandlerTools,
        judge: FetchJudge,
        local: LocalAnswers,
        connection: Callable[[], FetchConnection],
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
            if not tiered.is_tiered(partition):
                return None
            end_offset = tiered.end_offset(partition)
            log_start = self._local.log_start(partition)
        except RemoteLogError:
            return PartitionPatch(error_code=UNAVAILABLE)
        # Only the leader can say whether it confirms a log start above the offset: the next request is held to ask it.
        connection = self._connection()
        connection.authorized_topics.add(head.topic)
        connection.just_seen.add((head.topic, head.partition))
        connection.drops_session = True
        watermarks = self._tools.bounds.watermarks_above(partition, end_offset)
        return PartitionPatch(ErrorCode.NONE, watermarks.high_watermark, watermarks.last_stable_offset, log_start)
