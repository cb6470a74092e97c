"""Explains one partition: where its offsets are, and why each segment is still there, or not there yet.

It asks no broker and no store. Every "why" of a copy, a trim or an expiry comes from the functions by which
the tasks decide (`trim_holds`, `expiry_holds`, `copy_hold`, `copy_due`). What is added here are the states in which no
task decides: a stop, a failing stage, an earlier segment that is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Final, NamedTuple

from tiers.config.topic_policy import Refusal, TopicPolicy, resume_command
from tiers.config.total_retention import Retention
from tiers.explain.answers import (
    OffsetAnswer,
    PartitionAnswer,
    Place,
    Question,
    SegmentAnswer,
    StateReason,
    UncopiedAnswer,
    Why,
)
from tiers.explain.facts import LocalFacts, PartitionFacts
from tiers.explain.words import why, why_held
from tiers.metadata.remote_log import LEFT_AFTER_MS
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.object_key import log_key
from tiers.tasks.copy.uncopied import MIN_BATCH_BYTES, Uncopied, copy_due, copy_hold
from tiers.tasks.history.align import open_cut
from tiers.tasks.hold import Hold, TrimView, expiry_hold, expiry_holds, trim_hold, trim_holds
from tiers.tasks.retention.trim_task import covering_segments
from tiers.texts import duration_text


class _Work(NamedTuple):
    """The work of the owner that would end a question."""

    verb: str
    hold: Callable[[TopicPolicy], Hold | None]
    """Returns the setting that holds the work for the whole topic."""
    stages: tuple[str, ...]
    """The stages whose failure holds the work (docs/design.md, "Log range")."""


_WORK: Final[Mapping[Question, _Work]] = {
    Question.ON_BROKER: _Work("trims", trim_hold, ("survey", "facts", "trim")),
    Question.NOT_REMOTE: _Work("copies", copy_hold, ("survey", "gap", "copy")),
    Question.NOT_EXPIRED: _Work("expires", expiry_hold, ("survey", "expiry", "deletion")),
}


class Explanation:
    """The explanation of one partition. It reads the metadata once, and computes the holds of all segments once."""

    def __init__(self, facts: PartitionFacts) -> None:
        self._facts = facts
        metadata, partition = facts.remote.metadata, facts.remote.partition
        self.log_start = facts.log_start
        self.segments = list(metadata.list_remote_log_segments(partition))
        """All segments that the metadata knows, by ascending start offset."""
        readable = (each.metadata for each in metadata.answering_segments(partition, self.log_start))
        self.answering = {each.segment_id: each for each in readable}
        """The segments that answer for the offsets of the log."""
        local_start = None if facts.bounds is None else facts.bounds.log_start_offset
        self._open_cut = open_cut(metadata, partition, facts.remote.log_start(local_start))

    def partition(self) -> PartitionAnswer:
        """Returns every segment, and the part that is only local."""
        facts, bounds = self._facts, self._facts.bounds
        return PartitionAnswer(
            topic=facts.remote.partition.topic,
            partition=facts.remote.partition.partition,
            log_start=self.log_start,
            remote_start=next((each.start_offset for each in self.answering.values()), None),
            remote_end=facts.remote.end(self.log_start),
            local_log_start=None if bounds is None else bounds.log_start_offset,
            last_stable_offset=None if bounds is None else bounds.last_stable_offset,
            high_watermark=None if bounds is None else bounds.high_watermark,
            owner=facts.owner.name,
            notes=tuple(self._notes()),
            segments=tuple(map(self._segment, self.segments)),
            uncopied=self._uncopied(),
        )

    def segment_at_time(self, time_ms: int) -> RemoteLogSegmentMetadata | None:
        """Returns the first readable segment with a record of that time or later; None: no remote record is so new.

        Timestamps need not ascend in a log, so this is the first segment by offset, as for ListOffsets."""
        return next((each for each in self.answering.values() if each.max_timestamp_ms >= time_ms), None)

    def _notes(self) -> Iterator[str]:
        facts = self._facts
        match facts.policy:
            case None:
                yield "This proxy's file does not tier the topic, and no setting of the topic does."
            case Refusal(reason=reason):
                yield f"The topic cannot be tiered: {reason}."
            case TopicPolicy() as policy:
                for work in sorted(policy.paused):
                    ends = resume_command(policy.topic, [work])
                    yield f"An operator paused {work.value}: `{ends}` ends the pause."
                if policy.total_conflict:
                    yield f"Nothing of the topic expires: {policy.total_conflict}."
        if facts.local is None:
            yield f"The leader does not answer: {facts.local_trouble or 'it was not asked'}."
        if (stop := self._stop(Question.ON_BROKER) or self._stop(Question.NOT_EXPIRED)) is not None:
            yield stop.sentence
        if facts.owner.unfit:
            yield f"The owner is unfit: {facts.owner.unfit}."
        for stage, error in facts.owner.troubles.items():
            yield f"The stage {stage!r} of the owner fails: {error}."
        yield from facts.remarks
        for gap in facts.remote.gaps():
            yield (
                f"The offsets {gap.first_offset} to {gap.next_offset - 1} are a gap: the broker removed them before"
                " they were copied."
            )

    def _segment(self, segment: RemoteLogSegmentMetadata) -> SegmentAnswer:
        facts = self._facts
        place = self._place_of(segment)
        return SegmentAnswer(
            id=str(segment.segment_id.id),
            start_offset=segment.start_offset,
            end_offset=segment.end_offset if segment.is_cut_off else segment.valid_end_offset,
            size_bytes=segment.segment_size_bytes,
            state=segment.state.name,
            place=place,
            object=log_key(facts.cluster_id, segment) if facts.cluster_id else "",
            max_timestamp_ms=segment.max_timestamp_ms,
            leader_epochs=tuple(entry.epoch for entry in segment.segment_leader_epochs),
            whys=tuple(self._whys(segment, place)),
        )

    def _uncopied(self) -> UncopiedAnswer:
        local = self._facts.local
        if local is None:
            return UncopiedAnswer(0, 0, ())
        bounds = local.bounds
        first = self._facts.remote.next_local(bounds)
        whys: list[Why] = []
        if first < bounds.last_stable_offset:
            whys.append(self._not_copied(local))
        if bounds.last_stable_offset < bounds.high_watermark:
            whys.append(
                why(
                    Question.NOT_REMOTE,
                    StateReason.OPEN_TRANSACTION,
                    f"A transaction is open from offset {bounds.last_stable_offset} on. The owner copies only below the"
                    " last stable offset.",
                )
            )
        return UncopiedAnswer(first, bounds.high_watermark, tuple(whys))

    def offset(self, offset: int) -> OffsetAnswer:
        bounds = self._facts.bounds
        if bounds is not None and offset >= bounds.high_watermark:
            sentence = f"The log ends before offset {offset}: the next record gets offset {bounds.high_watermark}."
            return OffsetAnswer(offset, Place.BEYOND_END, sentence)
        if offset < self.log_start:
            sentence = (
                f"The log starts at offset {self.log_start}{self._log_start_reason}. The record at offset {offset} is"
                " deleted."
            )
            return OffsetAnswer(offset, Place.DELETED, sentence, continues_at=self.log_start)
        is_local = bounds is not None and offset >= bounds.log_start_offset
        holder = self._facts.remote.metadata.remote_log_segment_metadata(self._facts.remote.partition, offset)
        if holder is not None:
            found = self._segment(holder)
            if is_local:
                sentence = f"Both tiers have offset {offset}: the broker, and the remote segment {found.id}."
                return OffsetAnswer(offset, Place.BOTH, sentence, found, whys=found.whys)
            sentence = f"The remote tier has offset {offset}, in the segment {found.id}."
            if bounds is None:
                sentence += " Whether the broker has it, too, is not known: the leader does not answer."
            return OffsetAnswer(offset, Place.REMOTE, sentence, found, whys=found.whys)
        if is_local:
            whys = self._uncopied().whys
            return OffsetAnswer(offset, Place.LOCAL, f"The broker alone has offset {offset}.", whys=whys)
        return self._missing(offset)

    def _missing(self, offset: int) -> OffsetAnswer:
        remote = self._facts.remote
        gap = remote.metadata.gap_at(remote.partition, offset)
        if gap is not None:
            sentence = (
                f"Offset {offset} lies in a gap: the broker removed the offsets {gap.first_offset} to"
                f" {gap.next_offset - 1} before they were copied. A Fetch goes on at offset {gap.next_offset}."
            )
            return OffsetAnswer(offset, Place.GAP, sentence, continues_at=gap.next_offset)
        void = next((each for each in self.segments if each.start_offset <= offset <= each.end_offset), None)
        if self._facts.local is None:
            sentence = f"The remote tier does not have offset {offset}, and the leader does not answer."
        elif void is not None and void.is_cut_off:
            sentence = f"Offset {offset} is void: another leader's records replaced it."
        else:
            sentence = (
                f"Neither tier has offset {offset}, though the log starts at offset {self.log_start}. A client gets"
                f" an error that it retries. `tidegate tier bounds {remote.partition.topic}` and"
                " docs/recovery.md, 'A partition stops', help."
            )
        found = None if void is None else self._segment(void)
        return OffsetAnswer(offset, Place.UNKNOWN, sentence, found)

    @property
    def _log_start_reason(self) -> str:
        recorded = self._facts.remote.metadata.log_starts(self._facts.remote.partition)
        found = next((each for each in recorded if each.offset == self.log_start), None)
        return "" if found is None else f" (reason: {found.reason.name})"

    def _place_of(self, segment: RemoteLogSegmentMetadata) -> Place:
        if segment.segment_id not in self.answering:
            return Place.UNKNOWN
        bounds = self._facts.bounds
        is_local = bounds is not None and segment.valid_end_offset >= bounds.log_start_offset
        return Place.BOTH if is_local else Place.REMOTE

    def _whys(self, segment: RemoteLogSegmentMetadata, place: Place) -> Iterator[Why]:
        facts, log_start = self._facts, self.log_start
        age_ms = facts.now_ms - segment.event_timestamp_ms
        if segment.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            sentence = f"A copy of this segment began {duration_text(age_ms)} ago, and has not ended."
            reason = StateReason.COPY_BEGUN
            if age_ms >= LEFT_AFTER_MS:
                reason = StateReason.COPY_LEFT
                sentence += " The owner reads it back until it knows whether the store has it whole."
            yield why(Question.NOT_REMOTE, reason, sentence)
        elif segment.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
            sentence = f"The deletion of this segment began {duration_text(age_ms)} ago, and has not ended."
            yield self._trouble(Question.NOT_EXPIRED) or why(Question.NOT_EXPIRED, StateReason.DELETION_BEGUN, sentence)
        elif segment.is_cut_off:
            sentence = (
                "Another leader's records replaced the segment. The owner deletes it when the total retention in time"
                " has passed since then."
            )
            yield why(Question.NOT_EXPIRED, StateReason.VOID, sentence)
        elif segment.valid_end_offset < log_start:
            sentence = f"The log starts at offset {log_start}. The owner deletes the segment in its next round."
            below = why(Question.NOT_EXPIRED, StateReason.BELOW_LOG_START, sentence)
            policy = self._policy(Question.NOT_EXPIRED)
            yield policy if isinstance(policy, Why) else below
        elif place is Place.UNKNOWN:
            sentence = "Another copy answers for all offsets of this one. The owner deletes it in a later round."
            yield why(Question.NOT_EXPIRED, StateReason.SUPERSEDED, sentence)
        else:
            trim = facts.remote.last_trim()
            if place is Place.BOTH:
                yield self._on_broker[segment.segment_id]
            elif facts.local is None and (trim is None or segment.valid_end_offset >= trim.offset):
                sentence = f"The leader does not answer, so the owner trims nothing: {facts.local_trouble}"
                yield why(Question.ON_BROKER, StateReason.LEADER_UNKNOWN, sentence)
            yield self._not_expired[segment.segment_id]

    @cached_property
    def _on_broker(self) -> Mapping[RemoteLogSegmentId, Why]:
        """Why each segment that both tiers have is still on the broker."""
        facts, local, question = self._facts, self._facts.local, Question.ON_BROKER
        assert local is not None
        both = [each for each in self.answering.values() if self._place_of(each) is Place.BOTH]
        policy = self._policy(question)
        if isinstance(policy, Why):
            return {each.segment_id: policy for each in both}
        local_start = local.bounds.log_start_offset
        covering = covering_segments(facts.remote.metadata, facts.remote.partition, local_start)
        next_offset = covering[-1].valid_end_offset + 1 if covering else local_start
        view = TrimView(local.bounds.last_stable_offset, facts.now_ms, facts.visible_after_ms, self._visible_for_ms)
        found = self._held_or_due(question, policy, trim_holds(policy, covering, view), self._share_hold)
        sentence = (
            f"The broker has records from offset {next_offset} on that are not remote, before this segment. The owner"
            " trims only what is remote without a hole."
        )
        uncopied = why(question, StateReason.UNCOPIED_BEFORE, sentence)
        return {each.segment_id: found.get(each.segment_id, uncopied) for each in both}

    def _visible_for_ms(self, segment: RemoteLogSegmentMetadata) -> int | None:
        """Without the owner's own times, the time since the end of the copy stands for them."""
        seen = self._facts.owner.visible_for_ms
        return self._facts.now_ms - segment.event_timestamp_ms if seen is None else seen.get(segment.segment_id)

    @cached_property
    def _not_expired(self) -> Mapping[RemoteLogSegmentId, Why]:
        """Why each readable segment has not expired."""
        facts, question = self._facts, Question.NOT_EXPIRED
        policy = self._policy(question)
        if isinstance(policy, Why):
            return dict.fromkeys(self.answering, policy)
        retention = Retention(policy.retention_ms, policy.retention_bytes)
        uncopied_bytes = 0 if facts.local is None else min(facts.local.uncopied_bytes, MIN_BATCH_BYTES)
        holds = expiry_holds(self.answering.values(), retention, facts.now_ms, uncopied_bytes)
        return self._held_or_due(question, policy, holds)

    def _held_or_due(
        self,
        question: Question,
        policy: TopicPolicy,
        holds: Iterable[tuple[RemoteLogSegmentMetadata, Hold | None]],
        other_hold: Callable[[RemoteLogSegmentMetadata], Why | None] = lambda segment: None,
    ) -> dict[RemoteLogSegmentId, Why]:
        """The first segment that is held, by `holds` or by `other_hold`, holds the later ones."""
        found: dict[RemoteLogSegmentId, Why] = {}
        held: RemoteLogSegmentMetadata | None = None
        for segment, hold in holds:
            holding = other_hold(segment) if hold is None else why_held(question, hold, policy)
            if hold is None and held is not None:
                sentence = (
                    f"The segment from offset {held.start_offset} on is held, and the owner {_WORK[question].verb} from"
                    " the beginning of the log only."
                )
                holding = why(question, StateReason.BEHIND_EARLIER, sentence)
            elif holding is not None:
                held = held or segment
            found[segment.segment_id] = holding or self._due(question)
        return found

    def _share_hold(self, segment: RemoteLogSegmentMetadata) -> Why | None:
        start = None if self._facts.local is None else self._facts.local.share_start
        if start is None or start > segment.valid_end_offset:
            return None
        sentence = f"A share group still reads from offset {start} on, and share groups read from the broker alone."
        return why(Question.ON_BROKER, StateReason.SHARE_GROUP, sentence)

    def _not_copied(self, local: LocalFacts) -> Why:
        """Why the records below the last stable offset are not remote."""
        facts, question = self._facts, Question.NOT_REMOTE
        policy = self._policy(question)
        if isinstance(policy, Why):
            return policy
        attempts = [each for each in self.segments if each.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED]
        if attempts:
            newest = max(attempts, key=lambda each: each.event_timestamp_ms)
            return next(self._whys(newest, Place.UNKNOWN))
        hold = facts.owner.copy_hold
        if hold is None:
            # The owner alone knows how old the records are.
            hold = copy_due(policy, Uncopied(1, local.uncopied_bytes), facts.now_ms)
            if hold is None:
                return self._due(question)
            if (absent := self._without_owner(question)) is not None:
                return absent
            hold = replace(hold, at_ms=None)
        is_over = hold.at_ms is not None and hold.at_ms <= facts.now_ms
        return self._due(question) if is_over else why_held(question, hold, policy)

    def _policy(self, question: Question) -> TopicPolicy | Why:
        """Returns the policy, or what holds the whole partition: no policy, a stop, a doubt, a setting, a trouble."""
        policy = self._facts.policy
        if not isinstance(policy, TopicPolicy):
            reason = policy.reason if isinstance(policy, Refusal) else "this proxy's file does not tier it"
            return why(question, StateReason.NOT_TIERED, f"This proxy does not manage the topic: {reason}.")
        if (stop := self._stop(question)) is not None:
            return stop
        hold = _WORK[question].hold(policy)
        return self._trouble(question) or policy if hold is None else why_held(question, hold, policy)

    def _trouble(self, question: Question) -> Why | None:
        for stage in _WORK[question].stages:
            error = self._facts.owner.troubles.get(stage)
            if error is not None:
                sentence = f"The stage {stage!r} of the owner fails, and is tried again: {error}."
                return why(question, StateReason.STAGE_FAILS, sentence)
        return None

    def _due(self, question: Question) -> Why:
        sentence = f"Nothing holds it: the owner {_WORK[question].verb} it in one of its next rounds."
        return self._without_owner(question) or why(question, StateReason.DUE, sentence)

    def _without_owner(self, question: Question) -> Why | None:
        """Returns why no owner can do the work; None: an owner can."""
        owner, verb = self._facts.owner, _WORK[question].verb
        if owner.name == "":
            sentence = f"The partition has no owner, and no other process {verb} it."
            return why(question, StateReason.NO_OWNER, sentence)
        if owner.unfit:
            sentence = f"The owner is unfit: {owner.unfit}. It {verb} it when it is fit again, or the next owner does."
            return why(question, StateReason.OWNER_UNFIT, sentence)
        return None

    def _stop(self, question: Question) -> Why | None:
        """A leader with another history holds everything. A doubt about the past holds everything but copying."""
        owner, cut = self._facts.owner, self._open_cut
        if owner.stopped:
            sentence = (
                f"The leader has another history than the copied log: {owner.stopped}. The owner copies, trims"
                " and expires nothing (docs/recovery.md, 'A partition stops')."
            )
            return why(question, StateReason.STOPPED, sentence)
        if cut is not None and question is Question.NOT_EXPIRED:
            sentence = (
                f"The tier was cut at offset {cut.offset}, and the leader has forgotten whether its log"
                " parts from the copied records below that. The owner expires and deletes nothing until `tidegate tier"
                " cut` names the offset (docs/recovery.md, 'A partition stops')."
            )
            return why(question, StateReason.UNPROVED_CUT, sentence)
        if not owner.doubt or question is Question.NOT_REMOTE:
            return None
        sentence = (
            f"The owner may doubt that the metadata knows all copies: {owner.doubt}. In doubt, it trims,"
            " expires and deletes nothing, and goes on copying. The alarm metadata-lost shows a doubt"
            " (docs/recovery.md, 'A partition stops')."
        )
        return why(question, StateReason.DOUBT, sentence)
