"""`PartitionFacts`: what is known of one partition, as the input of an explanation.

The caller asks the brokers, the store and the group, and makes the metadata fresh. A fact that the caller does not know
stays None, and the explanation leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiers.config.settings import DEFAULT_VISIBLE_AFTER_MS
from tiers.config.topic_policy import Refusal, TopicPolicy
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.hold import Hold


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """The leader's log.

    `share_start` is the lowest offset that a share group still reads. The records that are not remote have at least
    `uncopied_bytes`."""

    bounds: LocalLogBounds
    share_start: int | None = None
    uncopied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """What the owner knows. A command that runs beside the owner knows only a part of it.

    `copy_hold` says why the owner's last round copied nothing. `troubles` has the last error of each stage that fails,
    by the stage's name. `doubt` says why the owner may doubt the past, `stopped` why the leader's log stops the
    partition."""

    name: str | None = None
    visible_for_ms: Mapping[RemoteLogSegmentId, int] | None = None
    copy_hold: Hold | None = None
    troubles: Mapping[str, str] = field(default_factory=dict)
    stopped: str = ""
    doubt: str = ""
    unfit: str = ""


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """The facts. `now_ms` is the wall clock. `policy` is None if no setting tiers the topic.

    `local` is None while the leader is not known, and `local_trouble` says why. `cluster_id` is that in object keys;
    empty: the keys are not known. `remarks` are sentences of the caller about the partition."""

    remote: RemoteLog
    now_ms: int
    policy: TopicPolicy | Refusal | None
    local: LocalFacts | None = None
    local_trouble: str = ""
    owner: OwnerFacts = field(default_factory=OwnerFacts)
    visible_after_ms: int = DEFAULT_VISIBLE_AFTER_MS
    cluster_id: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def bounds(self) -> LocalLogBounds | None:
        return None if self.local is None else self.local.bounds

    @property
    def log_start(self) -> int:
        """The log start of both tiers; without an answer of the leader, that of the tier.

        While it is not known what the head of the log has, it is the recorded one."""
        bounds, remote = self.bounds, self.remote
        if bounds is None:
            return remote.metadata.log_start_offset(remote.partition) or 0
        local_start = bounds.log_start_offset
        recorded, earliest = remote.log_start(local_start), remote.earliest(local_start)
        if remote.attempt_at_head(recorded, local_start) is not None or remote.lost_trim(recorded) is not None:
            return recorded
        return local_start if earliest is None else earliest
