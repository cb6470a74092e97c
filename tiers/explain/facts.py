"""`PartitionFacts`: what is known of one partition, as the input of an explanation.

The caller asks the brokers, the store and the group. `facts_of` reads the rest from the metadata of this process, which
is local and synchronous. A fact that the caller does not know stays None, and the explanation leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiers.config.topic_policy import Refusal, TopicPolicy
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap, LogStart
from tiers.model.segment_metadata import Cut, RemoteLogSegmentMetadata
from tiers.tasks.history.align import open_cut
from tiers.tasks.hold import Hold

DEFAULT_VISIBLE_AFTER_MS = 10_000


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """The leader's log.

    `share_start` is the lowest offset that a share group still reads. The records that are not remote have at least
    `uncopied_bytes`."""

    bounds: LocalLogBounds
    leader: int | None = None
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

    `segments` are all that the metadata knows, by ascending start offset. `answering` are those that answer for the
    offsets of the log. `local` is None while the leader is not known, and `local_trouble` says why."""

    partition: TopicIdPartition
    now_ms: int
    policy: TopicPolicy | Refusal | None
    segments: tuple[RemoteLogSegmentMetadata, ...] = ()
    answering: tuple[RemoteLogSegmentMetadata, ...] = ()
    gaps: tuple[LogGap, ...] = ()
    log_starts: tuple[LogStart, ...] = ()
    open_cut: Cut | None = None
    """A CUT that is not proved: nothing of the partition expires."""
    local: LocalFacts | None = None
    local_trouble: str = ""
    owner: OwnerFacts = field(default_factory=OwnerFacts)
    visible_after_ms: int = DEFAULT_VISIBLE_AFTER_MS
    cluster_id: str = ""
    """The cluster id in object keys; empty: the keys are not known."""
    remarks: tuple[str, ...] = ()
    """Sentences of the caller about the partition, for example about a store that does not answer."""
    has_store: bool = True
    """Whether the store answered, as far as the caller asked it."""
    trimmed_to: int | None = None
    """The offset to which the last recorded trim moved the local log start."""

    @property
    def log_start(self) -> int:
        """The log start of both tiers; without an answer of the leader, that of the tier."""
        starts = [start.offset for start in self.log_starts[:1]]
        starts = starts or [segment.start_offset for segment in self.answering[:1]]
        starts += [self.local.bounds.log_start_offset] if self.local is not None else []
        return min(starts, default=0)

    @property
    def remote_end(self) -> int | None:
        """Ry: the last remote offset, inclusive."""
        return self.answering[-1].valid_end_offset if self.answering else None


def facts_of(
    metadata: RemoteLogMetadataState,
    partition: TopicIdPartition,
    policy: TopicPolicy | Refusal | None,
    now_ms: int,
    *,
    local: LocalFacts | None = None,
    local_trouble: str = "",
    owner: OwnerFacts | None = None,
    visible_after_ms: int = DEFAULT_VISIBLE_AFTER_MS,
    cluster_id: str = "",
    remarks: tuple[str, ...] = (),
    has_store: bool = True,
) -> PartitionFacts:
    """Adds what the metadata of this process knows. The caller has made it fresh. Reads no broker and no store."""
    log_starts = tuple(metadata.log_starts(partition))
    log_start = RemoteLog(metadata, partition).log_start()
    trim = metadata.local_log_start(partition)
    return PartitionFacts(
        partition=partition,
        now_ms=now_ms,
        policy=policy,
        segments=tuple(metadata.list_remote_log_segments(partition)),
        answering=tuple(each.metadata for each in metadata.answering_segments(partition, log_start)),
        gaps=tuple(metadata.gaps(partition)),
        log_starts=log_starts,
        open_cut=open_cut(metadata, partition, log_start),
        local=local,
        local_trouble=local_trouble,
        owner=owner or OwnerFacts(),
        visible_after_ms=visible_after_ms,
        cluster_id=cluster_id,
        remarks=remarks,
        has_store=has_store,
        trimmed_to=None if trim is None else trim.offset,
    )
