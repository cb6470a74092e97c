"""`tidegate tier verify`: reads back all segments of the remote tier, and names what is damaged or missing.

A partition's readable segments must also tile: outside recorded gaps, no offset may be missing from the log start to
the remote end. With `--resume FILE` the command notes intact segments in the file, and skips segments in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from proxy.commands.tier.tools import Concurrency, OptionalTarget, parse_target, partitions_of, run_command
from proxy.config import load_config
from tiers.access.open_tier import OpenTier, open_tier, readable_segments
from tiers.bounded_gather import bounded_gather
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile, show_json, show_table
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.texts import size_text
from tiers.upkeep.resume_notes import note_segment, noted_segments
from tiers.verify.segment_verification import Damage, verify_segment


@dataclass(frozen=True, slots=True)
class Finding:
    """`segment` is None if no segment has the offsets. `position` is where the damage begins in the stored log."""

    topic: str
    partition: int
    segment: str | None
    first_offset: int
    last_offset: int
    position: int | None
    what: str


@dataclass(slots=True)
class Verification:
    findings: list[Finding]
    segments: int = 0
    log_bytes: int = 0
    already_verified: int = 0


def verify(
    config: ConfigFile,
    target: OptionalTarget = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Notes intact segments in this file, and skips segments that are in it already."),
    ] = None,
    concurrency: Concurrency = 8,
    as_json: AsJson = False,
) -> None:
    """Reads all segments back and checks every checksum.

    Names each damaged chunk, and offsets that no segment has. Exit code 1: there is damage, or offsets are missing."""
    settings = load_config(config)
    parse_target(target)

    async def work() -> Verification:
        async with open_tier(settings, TERMINAL) as tier:
            return await verify_tier(tier, target, concurrency, resume)

    done = run_command(work)
    if as_json:
        show_json(
            {
                "findings": done.findings,
                "segments": done.segments,
                "log_bytes": done.log_bytes,
                "already_verified": done.already_verified,
            }
        )
    else:
        if done.findings:
            headings = ("partition", "segment", "from", "to", "position", "what is wrong")
            rows = [
                (
                    f"{each.topic}-{each.partition}",
                    each.segment,
                    each.first_offset,
                    each.last_offset,
                    each.position,
                    each.what,
                )
                for each in done.findings
            ]
            show_table(headings, rows, ("from", "to", "position"))
        before = f", {done.already_verified} were verified before" if done.already_verified else ""
        typer.echo(
            f"{done.segments} segments with {size_text(done.log_bytes)} of log were read{before}: "
            f"{len(done.findings) or 'no'} findings"
        )
    if done.findings:
        raise typer.Exit(FINDINGS)


async def verify_tier(tier: OpenTier, target: str | None, at_once: int, resume: Path | None) -> Verification:
    partitions = partitions_of(tier, target)
    segments = [each for partition in partitions for each in readable_segments(tier, partition)]
    done = Verification([each for partition in partitions for each in hole_findings(tier.state, partition)])
    ring = tier.key_ring if tier.key_ring.keys else None
    with ExitStack() as stack:
        whole = noted_segments(resume)
        notes = None if resume is None else stack.enter_context(resume.open("a"))
        left = [each for each in segments if str(each.segment_id.id) not in whole]
        done.already_verified = len(segments) - len(left)
        advance = stack.enter_context(TERMINAL.bar("log bytes", sum(each.segment_size_bytes for each in left)))

        async def check(segment: RemoteLogSegmentMetadata) -> list[Finding]:
            damages = (await verify_segment(tier.storage, segment, ring, on_read=advance)).damages
            done.segments += 1
            done.log_bytes += segment.segment_size_bytes
            if not damages and notes is not None:
                note_segment(notes, segment.segment_id)
            return [_finding(segment, damage) for damage in damages]

        for found in await bounded_gather(left, check, at_once):
            done.findings += found
    return done


def hole_findings(metadata: RemoteLogMetadataState, partition: TopicIdPartition) -> Iterator[Finding]:
    what = "no segment has these offsets"
    for first, end in RemoteLog(metadata, partition).remote_holes():
        yield Finding(partition.topic, partition.partition, None, first, end - 1, None, what)


def _finding(segment: RemoteLogSegmentMetadata, damage: Damage) -> Finding:
    partition = segment.topic_id_partition
    return Finding(
        partition.topic,
        partition.partition,
        str(segment.segment_id.id),
        damage.first_offset,
        damage.last_offset,
        damage.position,
        damage.what,
    )
