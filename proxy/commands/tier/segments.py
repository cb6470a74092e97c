"""`tidegate tier segments`: lists every segment of a topic or partition, in any state, with its location."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from proxy.commands.tier.tools import Concurrency, Target, parse_target, partitions_of, run_command
from proxy.config import load_config
from tiers.access.open_tier import OpenMetadata, OpenTier, location_of, open_metadata, open_tier
from tiers.bounded_gather import bounded_gather
from tiers.commands.console import TERMINAL, AsJson, ConfigFile, show_json, show_table, time_text
from tiers.errors import CorruptSegmentError, RemoteResourceNotFoundError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import Section, decode_sections
from tiers.segment.segment_encryption import wrapping_key_id
from tiers.storage.retries import with_retries
from tiers.texts import size_text


@dataclass(frozen=True, slots=True)
class Segment:
    """A line of the list. `end_offset` is inclusive. A CUT voids the offsets above `valid_end_offset`.

    `key` is the id of the wrapping key. It is set only with `--keys`."""

    topic: str
    partition: int
    segment: str
    state: str
    start_offset: int
    end_offset: int
    valid_end_offset: int
    leader_epoch: int
    leader_epochs: tuple[tuple[int, int], ...]
    size_bytes: int
    max_timestamp_ms: int
    location: str
    key: str | None = None


def segments(
    config: ConfigFile,
    target: Target,
    keys: Annotated[
        bool, typer.Option("--keys", help="Also shows each segment's wrapping key. Needs one GET per segment.")
    ] = False,
    concurrency: Concurrency = 16,
    as_json: AsJson = False,
) -> None:
    """Lists the segments of a topic or a partition.

    Shows the state, offsets, leader epochs, size and location of each segment. The leader epoch 3@70 begins at offset
    70. The location is `home`, the store of [storage], or a name of [[storage.locations]]."""
    settings = load_config(config)
    parse_target(target)

    async def work() -> list[Segment]:
        if keys:
            async with open_tier(settings, TERMINAL) as tier:
                return await segments_with_keys(tier, target, concurrency)
        async with open_metadata(settings, TERMINAL) as metadata:
            return [_line(each) for each in _segments_of(metadata, target)]

    found = run_command(work)
    if as_json:
        show_json(found)
        return
    headings = ["partition", "segment", "state", "from", "to", "leader epochs", "size", "newest record", "location"]
    rows = [
        (
            f"{each.topic}-{each.partition}",
            each.segment,
            each.state,
            each.start_offset,
            _end(each),
            " ".join(f"{epoch}@{start}" for epoch, start in each.leader_epochs),
            size_text(each.size_bytes),
            time_text(each.max_timestamp_ms),
            each.location,
            *([each.key] if keys else []),
        )
        for each in found
    ]
    show_table([*headings, *(["key"] if keys else [])], rows, ("from", "to", "size"))


def _end(segment: Segment) -> str:
    cut = segment.valid_end_offset != segment.end_offset
    void_from = max(segment.start_offset, segment.valid_end_offset + 1)
    return f"{segment.end_offset} (void from {void_from})" if cut else str(segment.end_offset)


def _segments_of(tier: OpenMetadata, target: str) -> list[RemoteLogSegmentMetadata]:
    return [
        each for partition in partitions_of(tier, target) for each in tier.state.list_remote_log_segments(partition)
    ]


async def segments_with_keys(tier: OpenTier, target: str, at_once: int) -> list[Segment]:
    """Returns the lines of the segments with their wrapping keys. Reads one object of each segment."""
    found = _segments_of(tier, target)
    with TERMINAL.bar("segments", len(found)) as advance:
        names = await bounded_gather(found, lambda each: _key_of(tier, each), at_once, lambda: advance(1))
    return [replace(_line(each), key=name) for each, name in zip(found, names, strict=True)]


def _line(segment: RemoteLogSegmentMetadata) -> Segment:
    partition = segment.topic_id_partition
    return Segment(
        topic=partition.topic,
        partition=partition.partition,
        segment=str(segment.segment_id.id),
        state=segment.state.name,
        start_offset=segment.start_offset,
        end_offset=segment.end_offset,
        valid_end_offset=segment.valid_end_offset,
        leader_epoch=segment.leader_epoch,
        leader_epochs=tuple((entry.epoch, entry.start_offset) for entry in segment.segment_leader_epochs),
        size_bytes=segment.segment_size_bytes,
        max_timestamp_ms=segment.max_timestamp_ms,
        location=location_of(segment),
    )


async def _key_of(tier: OpenTier, segment: RemoteLogSegmentMetadata) -> str:
    try:
        sections = decode_sections(await with_retries(lambda: tier.storage.fetch_indexes(segment)))
        section = sections.get(Section.ENCRYPTION)
        return "none" if section is None else wrapping_key_id(segment.segment_id.id, section)
    except RemoteResourceNotFoundError:
        return "unknown: the .indexes object is missing"
    except CorruptSegmentError as error:
        return f"unknown: {error}"
