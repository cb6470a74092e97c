"""`LostRecords`: what a metadata partition lacks, though this state was built from it, or before it was ever read.

A log that ends below what was read of it (emptied, restored from an older copy, cut by an unclean election) has lost
records; one that begins above what was read has deleted records that nobody here knows. Either way no answer about what
they named may pass for the truth, and the state that was read from them is the last that knows: it is kept, and the
partition is not fresh until the log has them again, or an operator gives the proxies another topic.

A log that lost records and has grown past them since looks whole: its offsets alone do not tell.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


class LostRecords:
    def __init__(self, reached: Mapping[int, int]) -> None:
        """`reached`: per metadata partition the next offset after all that was ever read."""
        self._reached = dict(reached)
        self._reasons: dict[int, str] = {}

    @property
    def reason(self) -> str | None:
        return next(iter(self._reasons.values()), None)

    def check(self, number: int, position: int, log_start: int, end: int) -> bool:
        """Whether the log lacks records. `end`: exclusive, of what its leader surely has committed."""
        reached = max(position, self._reached[number])
        if position < log_start:
            reason = f"records {position} to {log_start - 1} of metadata partition {number} were deleted unread"
        elif end < reached:
            reason = f"metadata partition {number} ends at {end} and was read to {reached}: the topic lost records"
        else:
            if self._reasons.pop(number, None) is not None:
                log.warning("a metadata partition is whole again", extra={"metadata_partition": number})
            return False
        if number not in self._reasons:
            log.error("the remote log metadata is not followed", extra={"reason": reason})
        self._reasons[number] = reason
        return True
