"""Log starts as a DeleteRecords request records them."""

from __future__ import annotations

from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, LogStartReason


def user_log_start(offset: int, leader_epoch: int = 5, last_epoch: int = UNKNOWN_EPOCH) -> LogStart:
    """Returns the log start of a user who deleted all records below `offset`.

    The default leader epoch is that of the fake brokers' logs."""
    return LogStart(offset, leader_epoch, LogStartReason.USER, last_epoch)
