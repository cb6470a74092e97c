"""`UnreadablePartitions`: the metadata partitions that brokers do not serve now, logged together."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiers.lasting_trouble import LastingTrouble


class UnreadablePartitions:
    """Keeps the error codes of the last Fetch of each partition.

    It logs with the level INFO, because the leaders of a new topic need a moment."""

    def __init__(self, logger: logging.Logger, clock_ms: Callable[[], int]) -> None:
        self._codes: dict[int, int] = {}
        self._lasting = LastingTrouble(
            logger,
            "some metadata partitions cannot be read yet",
            "all metadata partitions can be read",
            clock_ms=clock_ms,
            level=logging.INFO,
        )

    def refused(self, metadata_partition: int, error_code: int) -> None:
        self._codes[metadata_partition] = error_code

    def answered(self, metadata_partition: int) -> None:
        self._codes.pop(metadata_partition, None)

    def log(self, is_read: Callable[[int], bool]) -> None:
        """Logs a change. `is_read` tells whether the follower still reads a metadata partition."""
        codes = {number: code for number, code in self._codes.items() if is_read(number)}
        if codes:
            self._lasting.found(metadata_partitions=len(codes), error_codes=sorted(set(codes.values())))
        else:
            self._lasting.ended()
