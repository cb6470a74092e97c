"""`UnreadablePartitions`: the metadata partitions that cannot be read now, and why. The others are read meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiers.lasting_trouble import LastingTrouble
from tiers.metadata.state.replay import UnknownRecord

logger = logging.getLogger(__name__)


class UnreadablePartitions:
    """Keeps the error code of the last Fetch of each partition, and the records that cannot be read or replayed.

    It logs error codes together and with the level INFO, because the leaders of a new topic need a moment."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._codes: dict[int, int] = {}
        self._failures: dict[int, str] = {}
        self._unknown: dict[int, str] = {}
        self._lasting = LastingTrouble(
            logger,
            "some metadata partitions cannot be read yet",
            "all metadata partitions can be read",
            clock_ms=clock_ms,
            level=logging.INFO,
        )

    @property
    def reason(self) -> str | None:
        """Returns why a partition is not read although its leader answers, as a text for an operator."""
        return next(iter([*self._failures.values(), *self._unknown.values()]), None)

    def refused(self, number: int, error_code: int) -> None:
        self._codes[number] = error_code

    def answered(self, number: int) -> None:
        self._codes.pop(number, None)

    def failed(self, number: int, error: Exception) -> None:
        """Records that the partition has records that cannot be read or replayed. The follower tries again."""
        reason = f"records of metadata partition {number} cannot be read: {error!r}"
        if self._failures.get(number) != reason:
            logger.error("the remote log metadata of one metadata partition is not followed", extra={"reason": reason})
        self._failures[number] = reason

    def is_failing(self, number: int) -> bool:
        return number in self._failures

    def read(self, number: int, unknown: UnknownRecord | None) -> None:
        """Records that the partition was read, up to an unknown record if there is one."""
        if self._failures.pop(number, None) is not None:
            logger.warning("a metadata partition is read again", extra={"metadata_partition": number})
        if unknown is not None:
            self._unknown[number] = (
                f"metadata partition {number} has records of a later release from offset {unknown.offset} on:"
                f" upgrade this process ({unknown.what})"
            )
            logger.error("the remote log metadata is not followed", extra={"reason": self._unknown[number]})

    def unknown_record(self, number: int) -> str | None:
        """Returns which record of a later release ended the reading; None without one."""
        return self._unknown.get(number)

    def forget(self, number: int) -> None:
        self._unknown.pop(number, None)
        self._failures.pop(number, None)

    def log(self, is_read: Callable[[int], bool]) -> None:
        """Logs a change. `is_read` tells whether the follower still reads a metadata partition."""
        codes = {number: code for number, code in self._codes.items() if is_read(number)}
        if codes:
            self._lasting.found(metadata_partitions=len(codes), error_codes=sorted(set(codes.values())))
        else:
            self._lasting.ended()
