"""Decides when an owner copies. No state but its arguments decides, so an owner that restarts decides the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiers.config.paused_work import TierWork
from tiers.config.topic_policy import COPY_LAG_BYTES, COPY_LAG_MS, TopicPolicy
from tiers.tasks.hold import Hold, HoldReason

DUE_SHARE: Final = 0.4
"""The part of the broker's retention after which records are copied. The alarm `broker-retention-50` follows at 0.5, so
it is raised only when copying fails."""


@dataclass(frozen=True, slots=True)
class Uncopied:
    """The records from where copying continues up to the LSO.

    `size_bytes` is an estimate. `age_ms` is the age of the oldest record (`age_of_oldest`), and `timestamp_age_ms` that
    by its timestamp, whatever that is. `retention_share` is the part of the broker's retention that records which are
    not copied have used, if that retention is not the total."""

    offsets: int
    size_bytes: int
    age_ms: int = 0
    retention_share: float = 0.0
    timestamp_age_ms: int = 0

    @property
    def lag_ms(self) -> int:
        """The age that a lag counts. Behind a lag, each record is older than the last copy."""
        return max(self.age_ms, self.timestamp_age_ms)


def copy_hold(policy: TopicPolicy) -> Hold | None:
    """Returns why nothing of the topic is copied, whatever its records are."""
    if policy.copy_disable:
        return Hold(HoldReason.COPY_DISABLED)
    if TierWork.COPYING in policy.paused:
        return Hold(HoldReason.COPYING_PAUSED)
    return None


def copy_due(policy: TopicPolicy, uncopied: Uncopied, now_ms: int) -> Hold | None:
    """Returns why the records are not copied yet. None: they are due."""
    is_due = is_any_size(policy, uncopied) or is_full(policy, uncopied)
    if uncopied.offsets > 0 and is_due and (uncopied.retention_share >= DUE_SHARE or not _is_delayed(policy, uncopied)):
        return None
    values = {"size_bytes": uncopied.size_bytes, "segment.bytes": policy.segment_bytes}
    values |= {"age_ms": uncopied.age_ms, "segment.ms": policy.segment_ms}
    waits_ms = [policy.segment_ms - uncopied.age_ms]
    if has_lag(policy):
        values |= {COPY_LAG_MS: policy.copy_lag_ms, COPY_LAG_BYTES: policy.copy_lag_bytes}
        waits_ms.append(policy.copy_lag_ms - uncopied.lag_ms)
    is_known = uncopied.offsets > 0 and not (has_lag(policy) and policy.copy_lag_ms < 0)
    return Hold(HoldReason.NOT_DUE, now_ms + max(waits_ms) if is_known else None, values)


def is_any_size(policy: TopicPolicy, uncopied: Uncopied) -> bool:
    """Whether the records are copied even if they do not fill a segment."""
    return uncopied.age_ms >= policy.segment_ms or uncopied.retention_share >= DUE_SHARE


def has_lag(policy: TopicPolicy) -> bool:
    """Whether records stay on the broker alone for a while (KIP-1241)."""
    return policy.copy_lag_ms != 0 and policy.copy_lag_bytes != 0


def _is_delayed(policy: TopicPolicy, uncopied: Uncopied) -> bool:
    """Whether neither lag is over. Kafka compares the newest record of a segment, and this method the oldest one."""
    lag_ms, lag_bytes = policy.copy_lag_ms, policy.copy_lag_bytes
    if 0 < lag_ms <= uncopied.lag_ms:
        return False
    return has_lag(policy) and not 0 < lag_bytes <= uncopied.size_bytes - policy.segment_bytes


def is_full(policy: TopicPolicy, uncopied: Uncopied) -> bool:
    """Whether the records fill a segment."""
    return uncopied.size_bytes >= policy.segment_bytes


def age_of_oldest(timestamp_ms: int | None, finished_ms: int | None, known_for_ms: int, now_ms: int) -> int:
    """Returns the age of the oldest record that is not remote.

    `timestamp_ms` is that of the record, `finished_ms` the time of the partition's last COPY_SEGMENT_FINISHED, and
    `known_for_ms` how long this owner has known the record. A timestamp counts if it lies between the last copy and
    now: a client may set any. Without one, the record is at most as old as the last copy. A restart resets the age only
    if there is no copy."""
    if finished_ms is None:
        return known_for_ms
    is_credible = timestamp_ms is not None and finished_ms <= timestamp_ms <= now_ms
    began_ms = timestamp_ms if timestamp_ms is not None and is_credible else finished_ms
    return max(known_for_ms, now_ms - began_ms)
