"""`tidegate tier quarantine`: lists the segments that other leaders' records replaced, and requests their deletion.

The command itself deletes nothing. It records the operator's request. The partition's owner, a running `tidegate
serve`, deletes the segment in its next round, if no part of it is readable then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from proxy.commands.tier.tools import run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import RemoteTierError, metadata_to_now, tiered_cluster
from tiers.commands.console import (
    FINDINGS,
    TERMINAL,
    AsJson,
    ConfigFile,
    ConfigFileOfGroup,
    default_config_file,
    runs_alone,
    show_json,
    show_table,
)
from tiers.commands.program import Program
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.retention.expiration_task import is_in_quarantine

_HELP = (
    "Lists segments that another leader's records replaced.\n\nA segment is in quarantine after an unclean election, or"
    " after an operator has accepted the leader's log with `tier accept`. Only `quarantine delete` deletes it."
)

quarantine = Program(
    name="quarantine", help=_HELP, invoke_without_command=True, add_completion=False, rich_markup_mode=None
)


@dataclass(frozen=True, slots=True)
class QuarantinedSegment:
    """One line of the answer. Offsets are inclusive. If `deletable` is false, a part of the segment is readable."""

    topic: str
    partition: int
    segment: str
    first_cut_off: int
    end_offset: int
    size_bytes: int
    deletable: bool
    deletion_asked: bool


@quarantine.callback()
def _quarantine(
    context: typer.Context,
    config: ConfigFileOfGroup = None,
    as_json: AsJson = False,
) -> None:
    """Lists the segments that another leader's records replaced. Only `quarantine delete` deletes them."""
    if not runs_alone(context):
        return
    found = _run(load_config(config or default_config_file()), ())
    if as_json:
        show_json(found)
    else:
        _print(found)


@quarantine.command()
def delete(
    config: ConfigFile,
    segment: Annotated[list[UUID], typer.Option("--segment", help="A listed segment's uuid. May be repeated.")],
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it, nothing is written.")] = False,
) -> None:
    """Asks the owners to delete listed segments for good.

    The partition's owner deletes a segment in its next round. Its records cannot be restored afterwards."""
    settings = load_config(config)
    found = {each.segment: each for each in _run(settings, ())}
    refused = [str(each) for each in segment if str(each) not in found]
    refused += [str(each) for each in segment if str(each) in found and not found[str(each)].deletable]
    if refused:
        typer.echo(
            f"these segments are not in quarantine, or a part of them is still readable: {', '.join(refused)}", err=True
        )
        raise typer.Exit(FINDINGS)
    _print([found[str(each)] for each in segment])
    if not yes:
        typer.echo("Nothing was written. Use --yes to write.")
        return
    _run(settings, segment)
    typer.echo("The request was written. The owners delete these segments in their next round.")


def _run(settings: TidegateConfig, wanted: Sequence[UUID]) -> list[QuarantinedSegment]:
    return run_command(lambda: read_quarantine(settings, wanted))


def _print(found: Sequence[QuarantinedSegment]) -> None:
    rows = [
        (
            f"{each.topic}-{each.partition}",
            each.segment,
            each.first_cut_off,
            each.end_offset,
            each.size_bytes,
            "requested" if each.deletion_asked else "yes" if each.deletable else "no: its head is readable",
        )
        for each in found
    ]
    show_table(["partition", "segment", "cut off from", "to", "bytes", "may be deleted"], rows)


async def read_quarantine(config: TidegateConfig, wanted: Sequence[UUID]) -> list[QuarantinedSegment]:
    """Returns the segments that were cut off, and requests the deletion of those in `wanted`.

    Raises `RemoteTierError` with a message of one line, for example when a part of a wanted segment is readable."""
    async with tiered_cluster(config) as (client, _):
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
            async with metadata_to_now(config, client, Path(folder), progress=TERMINAL) as metadata:
                segments = cut_segments(metadata)
                for each in segments:
                    if each.segment_id.id in wanted:
                        if not _deletable(metadata, each):
                            raise RemoteTierError(f"a part of the segment {each.segment_id.id} is still readable")
                        await metadata.ask_for_quarantine_deletion(each.segment_id)
                return [_line(metadata, each) for each in segments]


def cut_segments(metadata: RemoteLogMetadataReader) -> list[RemoteLogSegmentMetadata]:
    """Returns every segment that a clamp cut, of all partitions."""
    return [
        segment
        for partition in sorted(metadata.partitions(), key=lambda each: (each.topic, each.partition))
        for segment in metadata.list_remote_log_segments(partition)
        if segment.clamped_to is not None
    ]


def _deletable(metadata: RemoteLogMetadataReader, segment: RemoteLogSegmentMetadata) -> bool:
    return is_in_quarantine(segment, metadata.log_start_offset(segment.topic_id_partition) or 0)


def _line(metadata: RemoteLogMetadataReader, segment: RemoteLogSegmentMetadata) -> QuarantinedSegment:
    partition = segment.topic_id_partition
    return QuarantinedSegment(
        topic=partition.topic,
        partition=partition.partition,
        segment=str(segment.segment_id.id),
        first_cut_off=max(segment.start_offset, segment.valid_end_offset + 1),
        end_offset=segment.end_offset,
        size_bytes=segment.segment_size_bytes,
        deletable=_deletable(metadata, segment),
        deletion_asked=metadata.is_quarantine_deletion_asked(segment.segment_id),
    )
