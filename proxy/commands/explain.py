"""`tidegate explain`: tells where records are, and why a segment is on the broker, not yet remote, or not yet expired.

It reads the metadata topic and the facts in the store, and asks the leader and the owners' group. It changes nothing.
The rules and the sentences are those of `tiers/explain`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

import typer

from proxy.admin.words import outage_lines
from proxy.cluster.broker_configs import BrokerConfigs
from proxy.commands.admin_client import admin_client
from proxy.commands.tier.tools import Target, parse_target, run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import (
    TIMEOUT_MS,
    RemoteTierError,
    metadata_to_now,
    open_key_ring,
    open_storage,
    storage_cluster_id,
    tiered_cluster,
)
from tiers.bounded_gather import bounded_gather
from tiers.broker.client import monotonic_ms
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.broker.share_groups import ClusterShareGroups
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile, show_json
from tiers.config.tier_config import ConfigError
from tiers.errors import BrokerError, RemoteLogError, reason_of
from tiers.explain.answers import OffsetAnswer, PartitionAnswer, Place, SegmentAnswer, Why
from tiers.explain.explain import Explanation
from tiers.explain.facts import PartitionFacts
from tiers.explain.gathering import Surroundings, gather, policy_from
from tiers.log.broker_log import BrokerLogSource, offsets_for_times
from tiers.metadata.topic.group.group_members import group_members
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_fetcher import Caller
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.history.stored_facts import StoredFacts, read_stored_facts
from tiers.texts import moment_text, size_text

_READ_TIMEOUT_MS = 10_000
_PARTITIONS_AT_ONCE = 16
_MOST_MS = 2**63 - 1
_PLACES = {
    Place.REMOTE: "in the remote tier",
    Place.BOTH: "in both tiers",
    Place.UNKNOWN: "not readable",
}


def _time_ms(text: str) -> int:
    """Reads a time: milliseconds since 1970, or ISO 8601, in UTC unless it names a zone."""
    try:
        if text.removeprefix("-").isdecimal():
            if abs(found_ms := int(text)) > _MOST_MS:
                raise ValueError("no timestamp of a record")
            return found_ms
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"expected a time such as 2026-11-26T14:00:00Z, or milliseconds since 1970, not {text!r}"
        ) from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class Explained:
    """The answers about one partition. `offset` is None if the command did not ask for one offset or time.

    `time_remark` says how the time led to the offset."""

    partition: PartitionAnswer
    offset: OffsetAnswer | None = None
    time_remark: str = ""


def explain(
    config: ConfigFile,
    target: Target,
    offset: Annotated[
        int | None, typer.Option("--offset", min=0, help="Explain this offset of one partition alone.")
    ] = None,
    time_text: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="TIME", help="Explain the first record of this time: ISO 8601, or ms since 1970."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tells where the records of a topic are, and why.

    For each segment: why it is still on the broker, why it is not yet remote, why it has not expired. Exit code 1: the
    offset or the time has no record."""
    topic, number = parse_target(target)
    assert topic is not None
    if offset is not None and time_text is not None:
        raise typer.BadParameter("use --offset or --time, not both")
    time_ms = None if time_text is None else _time_ms(time_text)
    settings = load_config(config)
    if not as_json:
        for line in run_command(lambda: outages_of(settings)):
            typer.echo(line)
    found = run_command(lambda: explain_topic(settings, topic, number, offset, time_ms))
    if as_json:
        show_json(found)
    else:
        for each in found:
            for line in lines_of(each):
                typer.echo(line)
    is_single = offset is not None or time_ms is not None
    if is_single and not any(each.offset is not None and _has_record(each.offset) for each in found):
        raise typer.Exit(FINDINGS)


async def outages_of(config: TidegateConfig) -> list[str]:
    """Returns what the running proxy waits for, with the alarms that follow from it. Nothing if no proxy answers."""
    try:
        async with admin_client(config.admin) as admin:
            overview = await admin.overview()
    except (ConfigError, RemoteTierError):
        return []
    return [line for outage in overview.outages for line in outage_lines(outage, overview.as_of_ms)]


def _has_record(answer: OffsetAnswer) -> bool:
    return answer.place in (Place.LOCAL, Place.REMOTE, Place.BOTH)


async def explain_topic(
    config: TidegateConfig, topic: str, number: int | None, offset: int | None, time_ms: int | None
) -> list[Explained]:
    """Returns the answers for one partition, or for all partitions of the topic.

    Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, cluster), AsyncExitStack() as stack:
        partitions = _partitions(cluster, topic, number, needs_one=offset is not None)
        remarks: list[str] = []
        storage, cluster_id = await _storage(stack, config, cluster, remarks)
        read = await bounded_gather(partitions, lambda each: _stored(storage, cluster_id, each), _PARTITIONS_AT_ONCE)
        stored = dict(zip(partitions, read, strict=True))
        log = await stack.enter_async_context(metadata_to_now(config, client, progress=TERMINAL))
        members = None
        try:
            members = await group_members(client, config.remote_log.metadata_topic, TIMEOUT_MS)
        except BrokerError as error:
            remarks.append(f"The owner is not known: {error}.")
        around = Surroundings(
            client,
            BrokerLogSource(client),
            ClusterShareGroups(client),
            log,
            cluster_id,
            config.remote_log.visible_after_ms,
            members,
            TIMEOUT_MS,
            tuple(remarks),
            config.shared_digests(),
            storage,
        )
        own = log.state.topic_tier_config(partitions[0].topic_id)
        policy = policy_from(
            partitions[0],
            len(cluster.topics[topic].partitions),
            config.topics,
            own,
            await BrokerConfigs(client).of_policy(topic, TIMEOUT_MS),
        )
        key_ring = KeyRing() if time_ms is None else open_key_ring(config)

        async def of(partition: TopicIdPartition) -> Explained:
            facts = await gather(around, partition, policy, stored[partition], time.time_ns() // 1_000_000)
            asked, remark = offset, ""
            if time_ms is not None:
                asked, remark = await _offset_at(around, storage, key_ring, facts, time_ms)
            found = Explanation(facts)
            return Explained(found.partition(), None if asked is None else found.offset(asked), remark)

        return await bounded_gather(partitions, of, _PARTITIONS_AT_ONCE)


def _partitions(cluster: ClusterMetadata, topic: str, number: int | None, *, needs_one: bool) -> list[TopicIdPartition]:
    known = cluster.topics.get(topic)
    if known is None:
        raise typer.BadParameter(f"the cluster has no topic {topic}")
    if number is not None and number not in known.partitions:
        raise typer.BadParameter(f"{topic} has no partition {number}: it has {len(known.partitions)}, from 0 on")
    if number is None and needs_one and len(known.partitions) > 1:
        raise typer.BadParameter(f"{topic} has {len(known.partitions)} partitions: name one, such as {topic}:0")
    numbers = sorted(known.partitions) if number is None else [number]
    return [TopicIdPartition(known.topic_id, each, topic) for each in numbers]


async def _storage(
    stack: AsyncExitStack, config: TidegateConfig, cluster: ClusterMetadata, remarks: list[str]
) -> tuple[RemoteStorageManager | None, str]:
    """Opens the store. A store that does not answer becomes a remark."""
    cluster_id = storage_cluster_id(config, cluster.cluster_id)
    try:
        return await stack.enter_async_context(open_storage(config, cluster.cluster_id)), cluster_id
    except RemoteTierError as error:
        remarks.append(f"The store cannot be used: {error}.")
        return None, cluster_id


async def _stored(
    storage: RemoteStorageManager | None, cluster_id: str, partition: TopicIdPartition
) -> StoredFacts | str:
    if storage is None:
        return "The facts in the store are not known: the store cannot be used."
    try:
        return await read_stored_facts(storage, cluster_id, partition)
    except RemoteLogError as error:
        return f"The facts in the store cannot be read: {reason_of(error)}."


async def _offset_at(
    around: Surroundings,
    storage: RemoteStorageManager | None,
    key_ring: KeyRing,
    facts: PartitionFacts,
    time_ms: int,
) -> tuple[int | None, str]:
    """Returns the first offset of that time or later, and how it was found."""
    partition, segment = facts.remote.partition, Explanation(facts).segment_at_time(time_ms)
    moment = moment_text(time_ms)
    if segment is not None and storage is not None:
        try:
            async with RemoteLogReader(around.log, storage, ciphers=key_ring) as reader:
                caller = Caller(monotonic_ms() + _READ_TIMEOUT_MS, 0)
                end = facts.remote.end() or 0
                found = await reader.offset_for_timestamp(partition, time_ms, facts.log_start, end + 1, caller)
        except RemoteLogError as error:
            return segment.start_offset, (
                f"The index of the segment from offset {segment.start_offset} on cannot be read: {error}. The first"
                f" record of {moment} or later lies in this segment, or after it."
            )
        if found is not None:
            return found.offset, f"The first record of {moment} or later has offset {found.offset}."
    elif segment is not None:
        return segment.start_offset, (
            f"The first record of {moment} or later lies in the segment from offset {segment.start_offset} on, or after"
            " it. The store cannot be used, so the offset is not known."
        )
    try:
        asked = {partition: time_ms}
        offsets = await offsets_for_times(around.client, asked, is_committed_only=True, timeout_ms=TIMEOUT_MS)
    except BrokerError as error:
        return None, f"The leader cannot look the time up: {error}."
    if (offset := offsets[partition]) is None:
        return None, f"No record is of {moment} or later."
    return offset, f"The first record of {moment} or later has offset {offset}."


def lines_of(found: Explained) -> Iterator[str]:
    """Yields the answer as text."""
    answer = found.partition
    yield f"{answer.topic}:{answer.partition}"
    if found.time_remark:
        yield f"  {found.time_remark}"
    if found.offset is not None:
        yield from _offset_lines(found.offset)
        yield from (f"  {note}" for note in answer.notes)
        return
    yield f"  {_bounds_text(answer)}"
    if answer.owner:
        yield f"  The owner is {answer.owner}."
    yield from (f"  {note}" for note in answer.notes)
    for _, group in groupby(answer.segments, key=_kind):
        yield from _segment_lines(list(group))
    rest = answer.uncopied
    if rest.next_offset > rest.first_offset:
        yield f"  Offsets {rest.first_offset} to {rest.next_offset - 1}: on the broker alone."
        yield from (f"    {_why_text(each)}" for each in rest.whys)


def _bounds_text(answer: PartitionAnswer) -> str:
    parts = [f"The log starts at offset {answer.log_start}."]
    if answer.remote_end is None:
        parts.append("The remote tier has no segment.")
    else:
        parts.append(f"The remote tier has the offsets {answer.remote_start} to {answer.remote_end}.")
    if answer.local_log_start is not None and answer.high_watermark is not None:
        is_empty = answer.local_log_start >= answer.high_watermark
        parts.append(
            f"The broker has no record; the next one gets offset {answer.high_watermark}."
            if is_empty
            else f"The broker has the offsets {answer.local_log_start} to {answer.high_watermark - 1}."
        )
    return " ".join(parts)


def _kind(segment: SegmentAnswer) -> tuple[str, Place, tuple[str, ...]]:
    """Segments of one kind that follow each other are one paragraph."""
    return segment.state, segment.place, tuple(each.reason for each in segment.whys)


def _segment_lines(group: Sequence[SegmentAnswer]) -> Iterator[str]:
    first, last = group[0], group[-1]
    count = f"{len(group)} segments" if len(group) > 1 else f"segment {first.id}"
    place = _PLACES[first.place] if first.state == "COPY_SEGMENT_FINISHED" else first.state
    size_bytes = sum(each.size_bytes for each in group)
    yield f"  Offsets {first.start_offset} to {last.end_offset}: {count}, {size_text(size_bytes)}, {place}."
    for why in first.whys:
        yield f"    {_why_text(why, of_first=len(group) > 1 and why.at_ms is not None)}"


def _offset_lines(answer: OffsetAnswer) -> Iterator[str]:
    yield f"  {answer.sentence}"
    if answer.segment is not None:
        segment = answer.segment
        yield (
            f"  Segment: offsets {segment.start_offset} to {segment.end_offset}, {size_text(segment.size_bytes)},"
            f" leader epochs {', '.join(map(str, segment.leader_epochs))}, newest record"
            f" {moment_text(segment.max_timestamp_ms)}."
        )
        yield f"  Object: {segment.object}"
    yield from (f"  {_why_text(each)}" for each in answer.whys)


def _why_text(why: Why, *, of_first: bool = False) -> str:
    """`of_first`: the sentence has the numbers of the first of several segments."""
    until = "" if why.at_ms is None else f" This reason ends at the latest at {moment_text(why.at_ms)}."
    return f"Why {why.question}{', for the first of them' if of_first else ''}: {why.sentence}{until} See {why.rule}."
