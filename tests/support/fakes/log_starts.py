"""Log starts as a DeleteRecords request records them."""

from __future__ import annotations

from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, LogStartReason


def user_log_start(offset: int, leader_epoch: int = 5, last_epoch: int = UNKNOWN_EPOCH) -> LogStart:
    """Returns the log start of a user who deleted all records below `offset`.

    The default leader epoch is that of the fake brokers' logs."""
    return LogStart(offset, leader_epoch, LogStartReason.USER, last_epoch)


def makes_needless(known: LogStart, new: LogStart) -> bool:
    is_as_late = known.leader_epoch >= new.leader_epoch
    return is_as_late and (known.offset, known.last_epoch) >= (new.offset, new.last_epoch)


def replaces(new: LogStart, known: LogStart) -> bool:
    if not known.deletes or known.offset >= new.offset:
        return False
    if known.reason is LogStartReason.RETENTION:
        return known.leader_epoch <= new.leader_epoch
    return new.reason is LogStartReason.USER and known.leader_epoch == new.leader_epoch
