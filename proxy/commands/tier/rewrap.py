"""`tidegate tier rewrap`: wraps the keys of segments again, after an operator has changed the wrapping key.

Only the encryption section of the `.indexes` object changes. The segment's own key stays the same, and so does its log.
When no segment names an old wrapping key any more, the operator may remove it from [encryption.keys]. Running proxies
continue to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from proxy.commands.tier.tools import Concurrency, OptionalTarget, parse_target, partitions_of, run_command
from proxy.config import load_config
from tiers.access.open_tier import TIMEOUT_MS, OpenTier, open_tier
from tiers.bounded_gather import bounded_gather
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile, say, show_json, show_table
from tiers.config.tier_config import ConfigError
from tiers.errors import CorruptSegmentError, EncryptionKeyError, RemoteResourceNotFoundError, RemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import Section, decode_indexes_object, decode_sections, encode_sections
from tiers.segment.segment_encryption import KeyRing, wrapping_key_id
from tiers.storage.object_key import indexes_key
from tiers.storage.retries import with_retries


@dataclass(frozen=True, slots=True)
class Rewrapped:
    """A segment whose wrapping key is not the current one. `trouble` is None if it was rewrapped, or would be.

    `key` is the wrapping key that the command found. None: the command could not read it."""

    topic: str
    partition: int
    segment: str
    key: str | None
    trouble: str | None = None


def rewrap(
    config: ConfigFile,
    target: OptionalTarget = None,
    yes: Annotated[bool, typer.Option("--yes", "--apply", help="Write. Without it, nothing is written.")] = False,
    concurrency: Concurrency = 8,
    as_json: AsJson = False,
) -> None:
    """Wraps segments' keys with the current wrapping key.

    The current key is `encryption.current`. The command replaces the .indexes object of each segment whose key is
    wrapped with another one. Exit code 1: a segment could not be rewrapped."""
    settings = load_config(config)
    parse_target(target)
    current = settings.encryption.current
    if current is None:
        raise ConfigError("encryption is off: [encryption] has no `current`, which names the key to wrap with")

    async def work() -> list[Rewrapped]:
        async with open_tier(settings, TERMINAL) as tier:
            return await rewrap_all(tier, target, yes, concurrency)

    found = run_command(work)
    failed = [each for each in found if each.trouble is not None]
    if as_json:
        show_json({"current": current, "written": yes, "segments": found})
    else:
        _print(found)
        typer.echo(f"{len(found) - len(failed)} segments {'are' if yes else 'would be'} wrapped with {current!r} now")
    if not yes and found:
        say("Nothing was written. Use --yes to write.")
    if failed:
        raise typer.Exit(FINDINGS)


def _print(found: Sequence[Rewrapped]) -> None:
    if found:
        rows = [(f"{each.topic}-{each.partition}", each.segment, each.key, each.trouble) for each in found]
        show_table(("partition", "segment", "wrapped with", "trouble"), rows)


async def rewrap_all(tier: OpenTier, target: str | None, write: bool, at_once: int) -> list[Rewrapped]:
    """Rewraps the segments whose wrapping key is not the current one. Returns those, and those that failed."""
    segments = [
        each
        for partition in partitions_of(tier, target)
        for each in tier.state.list_remote_log_segments(partition)
        if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    ]

    async def one(segment: RemoteLogSegmentMetadata) -> Rewrapped | None:
        return await _rewrap_segment(tier, segment, write)

    with TERMINAL.bar("segments", len(segments)) as advance:
        found = await bounded_gather(segments, one, at_once, lambda: advance(1))
    return [each for each in found if each is not None]


async def _rewrap_segment(tier: OpenTier, segment: RemoteLogSegmentMetadata, write: bool) -> Rewrapped | None:
    partition, uuid = segment.topic_id_partition, segment.segment_id.id
    key: str | None = None
    try:
        data = await with_retries(lambda: tier.storage.fetch_indexes(segment))
        sections = decode_sections(data)
        section = sections.get(Section.ENCRYPTION)
        if section is None:
            return None
        key = wrapping_key_id(uuid, section)
        if key == tier.key_ring.current:
            return None
        rewrapped = wrapped_again(data, segment, tier.key_ring)
        if write:
            await _replace(tier, segment, data, rewrapped)
    except (RemoteResourceNotFoundError, CorruptSegmentError, EncryptionKeyError) as error:
        return Rewrapped(partition.topic, partition.partition, str(uuid), key, str(error))
    return Rewrapped(partition.topic, partition.partition, str(uuid), key)


def wrapped_again(data: bytes, segment: RemoteLogSegmentMetadata, ring: KeyRing) -> bytes:
    """Returns the `.indexes` object with a new encryption section. Sections of later versions stay unchanged."""
    sections = {number: bytes(content) for number, content in decode_sections(data).items()}
    sections[Section.ENCRYPTION] = ring.wrapped_again(segment.segment_id.id, sections[Section.ENCRYPTION])
    encoded = encode_sections(sections)
    decode_indexes_object(encoded, segment).remote_log_index(ring)
    return encoded


async def _replace(tier: OpenTier, segment: RemoteLogSegmentMetadata, before: bytes, after: bytes) -> None:
    place, key = tier.storage.place_of(segment), indexes_key(tier.cluster_id, segment)
    try:
        found = await with_retries(lambda: place.get_object(key))
    except RemoteResourceNotFoundError:
        found = b""
    if found != before:
        # A third-party store may use other object keys.
        raise RemoteStorageError(f"the store does not keep the indexes of {segment.segment_id.id} under {key}")
    await with_retries(lambda: place.put_object(key, after))
    await tier.log.ensure_fresh(segment.topic_id_partition, 0, TIMEOUT_MS)
    known = tier.state.remote_log_segment_metadata_by_id(segment.segment_id)
    if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
        # An owner deleted the segment meanwhile. Its DELETE record covers the object that was just written, which must
        # be deleted too.
        await with_retries(lambda: tier.storage.delete_log_segment_data(segment))
    elif await with_retries(lambda: tier.storage.fetch_indexes(segment)) != after:
        raise RemoteStorageError(f"the indexes of {segment.segment_id.id} do not read back as they were written")
