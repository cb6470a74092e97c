"""`tidegate tier metadata export | import`: one partition's metadata as the founding flat file.

See docs/semantics.md 11.3.

The file has the segments, their states and custom metadata, and the state of the partition's deletion. It cannot hold
the log start, so `import` takes the log start as an option. It cannot hold CUTs, so `export` refuses a partition with
segments that are cut. It has no tier settings either: in a new metadata topic, the owner removes nothing of a partition
whose stored facts have a pause or a total retention that the metadata lacks (docs/design.md, safety rule 5).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from proxy.commands.tier.tools import parse_partition, partitions_of, run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import (
    OpenTier,
    RemoteTierError,
    UnknownTargetError,
    metadata_to_now,
    open_tier,
    tiered_cluster,
)
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile, say, show_json
from tiers.commands.program import Program
from tiers.metadata.records.flat_file import FlatFile, PartitionDeleteEntry, decode_flat_file, write_flat_file
from tiers.metadata.records.serde import KeyAndValue, key_and_value
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, LogStartReason
from tiers.model.segment_metadata import (
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
    RemotePartitionDeleteMetadata,
    RemotePartitionDeleteState,
    leader_epoch_at,
)
from tiers.upkeep.importing import WRITER, write_all

metadata = Program(
    name="metadata",
    help="Exports or imports the metadata of one partition.",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
)

_Partition = Annotated[str, typer.Argument(metavar="TOPIC:PARTITION")]
_UNKNOWN_EPOCH = -1


@metadata.callback(invoke_without_command=True)
def _metadata(context: typer.Context) -> None:
    """Exports or imports the metadata of one partition."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@metadata.command(name="export")
def export_file(config: ConfigFile, partition: _Partition, file: Path, as_json: AsJson = False) -> None:
    """Writes the metadata of one partition to FILE.

    Replaces an existing file. Also prints the log start, which the file cannot hold: keep it for `import`. Exit code 1:
    unclean elections cut segments of the partition, which the file cannot hold either, so nothing was written."""
    settings = load_config(config)
    topic, number = parse_partition(partition)

    async def work() -> tuple[FlatFile, int | None]:
        async with open_tier(settings, TERMINAL) as tier:
            return exported(tier, f"{topic}:{number}")

    made, log_start = run_command(work)
    cut = [each for each in made.segments if each.cut_at is not None]
    if cut:
        say(f"nothing was written: unclean elections cut {len(cut)} segments, which the file cannot record")
        raise typer.Exit(FINDINGS)
    write_flat_file(file, made)
    answer = {
        "file": str(file),
        "segments": len(made.segments),
        "metadata_offset": made.metadata_offset,
        "log_start_offset": log_start,
    }
    if as_json:
        show_json(answer)
    else:
        typer.echo(
            f"{file}: {len(made.segments)} segments; the file cannot hold the log start, which is {log_start}: "
            "give it to `import` with --log-start"
        )


@metadata.command(name="import")
def import_file(
    config: ConfigFile,
    partition: _Partition,
    file: Path,
    log_start: Annotated[
        int | None,
        typer.Option(
            "--log-start", min=0, help="The log start that `export` printed. Default: the start of the first segment."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "--apply", help="Write. Without it, nothing is written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Writes the metadata in FILE to the metadata topic.

    The partition must have no metadata yet."""
    settings = load_config(config)
    topic, number = parse_partition(partition)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None
    made = run_command(lambda: import_into(settings, topic, number, data, log_start, yes))
    if as_json:
        show_json({"file": str(file), "segments": len(made.segments), "written": yes})
    else:
        typer.echo(f"{file}: {len(made.segments)} segments of {partition} {'were' if yes else 'would be'} written")
    if not yes:
        say("Nothing was written. Use --yes to write.")


def exported(tier: OpenTier, target: str) -> tuple[FlatFile, int | None]:
    """Returns the file's content, and the log start."""
    partition = partition_to_export(tier, target)
    known = tier.state
    state = known.remote_partition_delete_state(partition)
    now_ms = time.time_ns() // 1_000_000
    file = FlatFile(
        partition.topic_id,
        tier.log.follower.position(tier.log.metadata_partition(partition)),
        tuple(known.list_remote_log_segments(partition)),
        None if state is None else PartitionDeleteEntry(_UNKNOWN_EPOCH, now_ms, state),
    )
    return file, known.log_start_offset(partition)


def partition_to_export(tier: OpenTier, target: str) -> TopicIdPartition:
    """Returns the partition to export. If a topic was created again under its name, that is the existing topic's."""
    found = partitions_of(tier, target)
    there = [each for each in found if each.topic_id in tier.cluster.topics_by_id] or found
    if len(there) > 1:
        raise RemoteTierError(f"{target} is ambiguous: {len(there)} deleted topics had this name")
    return there[0]


async def import_into(
    config: TidegateConfig, topic: str, number: int, data: bytes, log_start: int | None, write: bool
) -> FlatFile:
    async with tiered_cluster(config, is_new=True) as (client, cluster):
        found = cluster.topics.get(topic)
        if found is None:
            raise UnknownTargetError(f"the cluster has no topic {topic}")
        if number not in found.partitions:
            raise UnknownTargetError(f"topic {topic} has no partition {number}")
        partition = TopicIdPartition(found.topic_id, number, topic)
        file = decode_flat_file(data, partition)
        if not write and config.remote_log.metadata_topic in cluster.topics:
            async with metadata_to_now(config, client, progress=TERMINAL) as known_now:
                _check_unknown(known_now.state, partition)
        if write:
            records = records_of_file(file, partition, log_start, time.time_ns() // 1_000_000)

            def of_one(known: TopicBasedMetadataLog) -> list[tuple[TopicIdPartition, list[KeyAndValue]]]:
                _check_unknown(known.state, partition)
                return [(partition, records)]

            def check(known: TopicBasedMetadataLog) -> None:
                wanted = {each.segment_id.id for each in file.segments}
                if {each.segment_id.id for each in known.state.list_remote_log_segments(partition)} != wanted:
                    raise RemoteTierError(f"the metadata of {topic}:{number} does not read back as it was written")

            await write_all(config, client, of_one, check, into_empty=False, progress=TERMINAL)
        return file


def _check_unknown(known: RemoteLogMetadataState, partition: TopicIdPartition) -> None:
    if partition in known.partitions():
        raise RemoteTierError(f"{partition.topic}:{partition.partition} already has metadata")


def records_of_file(
    file: FlatFile, partition: TopicIdPartition, log_start: int | None, now_ms: int
) -> list[KeyAndValue]:
    records: list[KeyAndValue] = []
    for segment in file.segments:
        records += _records_of_segment(segment)
    if log_start is not None:
        leader_epoch, last_epoch = _leader_epoch_at(file.segments, log_start), _epoch_before(file.segments, log_start)
        start = LogStart(log_start, leader_epoch, LogStartReason.USER, last_epoch)
        records.append(key_and_value(LogStartOffsetUpdate(partition, WRITER, now_ms, start)))
    if file.deletion is not None:
        # All states in order: replay accepts no step back, and an owner resumes from the last state.
        records += [
            key_and_value(RemotePartitionDeleteMetadata(partition, _UNKNOWN_EPOCH, now_ms, state))
            for state in RemotePartitionDeleteState
            if state <= file.deletion.state
        ]
    return records


def _leader_epoch_at(segments: Sequence[RemoteLogSegmentMetadata], offset: int) -> int:
    """Returns the leader epoch of the record at `offset`: a leader whose log has that record confirms the log start."""
    epochs = sorted((entry.start_offset, entry.epoch) for each in segments for entry in each.segment_leader_epochs)
    known = [epoch for start_offset, epoch in epochs if start_offset <= offset]
    return known[-1] if known else min((epoch for _, epoch in epochs), default=_UNKNOWN_EPOCH)


def _epoch_before(segments: Sequence[RemoteLogSegmentMetadata], offset: int) -> int:
    """Returns the leader epoch of the record before `offset`, if all readable segments that have it agree."""
    readable = [each for each in segments if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED]
    holding = [each for each in readable if each.start_offset < offset <= each.end_offset + 1]
    epochs = {leader_epoch_at(each.segment_leader_epochs, offset - 1) for each in holding}
    return epochs.pop() if len(epochs) == 1 else UNKNOWN_EPOCH


def _records_of_segment(segment: RemoteLogSegmentMetadata) -> list[KeyAndValue]:
    started = replace(segment, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED, custom_metadata=None)
    if segment.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED:
        return [key_and_value(started)]
    update = RemoteLogSegmentMetadataUpdate(
        segment.segment_id, segment.broker_id, segment.event_timestamp_ms, segment.state, segment.custom_metadata
    )
    return [key_and_value(started), key_and_value(update)]
