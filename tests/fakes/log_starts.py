"""Log starts as clients' DeleteRecords record them."""

from __future__ import annotations

from tiers.model.log_start import LogStart, LogStartReason


def user_log_start(offset: int, leader_epoch: int = 5) -> LogStart:
    """A user deleted everything below `offset`, in the leader epoch that the fake brokers' logs have."""
    return LogStart(offset, leader_epoch, LogStartReason.USER)
