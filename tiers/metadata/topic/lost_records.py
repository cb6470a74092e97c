"""`LostRecords` judges which records a metadata partition lacks, compared with what the follower read before.

A log that ends below the last read position has lost records: it was emptied, restored from an older copy, or cut by an
unclean election. A log that begins above the position has deleted records that the follower never read. In both cases
no answer about those records may count as the truth. The state that was built from the lost records is the last place
that has them, so it is kept. The partition is not fresh until the log has the records again, or until an operator
configures another topic.

A log that lost records and has grown since looks complete by its offsets. So a position also has the leader epoch of
the last batch that was read (docs/semantics.md 6.1). A leader whose log ends that epoch earlier has other records
there: its log has *diverged*. A divergence never ends by itself, not even when a later leader has all records again,
since owners wrote records meanwhile without knowing the lost ones. The state keeps the divergence. Only an operator
ends it, by removing that state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)

_WHAT_TO_DO = "see `tidegate tier rebuild` and 'The metadata topic is lost' in docs/operations.md"


class LostRecords:
    def __init__(self, reached: Mapping[int, OffsetAndEpoch], diverged: Mapping[int, str]) -> None:
        """Starts with the divergences that the state kept.

        `reached` has, by metadata partition, the next offset after the last record that was ever read. `diverged` has
        the reasons that the state kept."""
        self._reached = dict(reached)
        self._diverged = dict(diverged)
        self._reasons: dict[int, str] = {}

    @property
    def reason(self) -> str | None:
        return next(iter([*self._diverged.values(), *self._reasons.values()]), None)

    @property
    def diverged(self) -> Mapping[int, str]:
        """The diverged metadata partitions, each with its reason."""
        return self._diverged

    def reached(self, number: int) -> OffsetAndEpoch:
        return self._reached[number]

    def read_to(self, number: int, position: OffsetAndEpoch) -> None:
        self._reached[number] = max(position, self._reached[number])

    def check(self, number: int, position: int, log_start: int, end: int, *, is_continued: bool = True) -> bool:
        """Returns whether the log lacks records, judged by its offsets.

        `end` (exclusive) is the offset up to which the leader has surely committed. `is_continued` is true when the
        leader's log is known to continue the log that was read. Only such a log can become whole again."""
        reached = max(position, self._reached[number].offset)
        if number in self._diverged:
            return True
        if position < log_start:
            return self._lacks(
                number, f"records {position} to {log_start - 1} of metadata partition {number} were deleted unread"
            )
        if end < reached:
            return self._ends_early(number, end, reached)
        if is_continued and self._reasons.pop(number, None) is not None:
            logger.warning("a metadata partition has all records again", extra={"metadata_partition": number})
        return False

    def check_lineage(self, number: int, read: OffsetAndEpoch, answered: EpochEndOffset, high_watermark: int) -> bool:
        """Returns whether the leader's log lacks records that were read before `read`.

        `answered` is the end of the leader epoch of `read` in the leader's log. The log has diverged when it has
        committed another record at the offset of a missing one."""
        if number in self._diverged:
            return True
        if 0 <= answered.leader_epoch <= read.leader_epoch and answered.end_offset >= read.offset:
            return False  # the epoch may be lower: compaction may leave no record of the later epochs on this replica
        is_known = answered.leader_epoch >= 0
        ends_at = answered.end_offset if is_known and answered.end_offset < read.offset else read.offset - 1
        if high_watermark <= ends_at:
            return self._ends_early(number, high_watermark, read.offset)
        reason = (
            f"metadata partition {number} was read to {read.offset} in leader epoch {read.leader_epoch}, and now has"
            f" other records from {ends_at} on, or already below: it lost records and was written to since;"
            f" the follower does not read it until an operator decides: {_WHAT_TO_DO}"
        )
        logger.error("the remote log metadata is not followed", extra={"reason": reason})
        self._diverged[number] = reason
        self._reasons.pop(number, None)
        return True

    def _ends_early(self, number: int, end: int, reached: int) -> bool:
        return self._lacks(
            number, f"metadata partition {number} ends at {end} and was read to {reached}: the topic lost records"
        )

    def _lacks(self, number: int, reason: str) -> bool:
        if number not in self._reasons:
            logger.error("the remote log metadata is not followed", extra={"reason": reason})
        self._reasons[number] = reason
        return True
