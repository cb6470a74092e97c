"""`tidegate tier delete-missing`: lists tiered topics that no broker knows, and records which of them were deleted.

The command itself deletes no data. It records an operator's statement that a topic was deleted. The owners, which are
running `tidegate serve` processes, then delete the topic's remote data. They wait for the same delay as after every
other deletion.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

import typer

from proxy.commands.tier.tools import run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import TIMEOUT_MS, RemoteTierError, UnknownTargetError, metadata_to_now, tiered_cluster
from tiers.commands.console import (
    FINDINGS,
    TERMINAL,
    AsJson,
    ConfigFile,
    say,
    show_json,
    show_table,
    time_text,
)
from tiers.commands.quantities import duration_ms
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.tasks.deletion.topic_deletion import ClusterTopicExistence, deleted_topics
from tiers.texts import duration_text


@dataclass(frozen=True, slots=True)
class MissingTopic:
    """One line of the answer: a tiered topic that no broker knows.

    `missing_since_ms` is None while the owner has not recorded the time."""

    topic: str
    topic_id: str
    partitions: int
    segments: int
    size_bytes: int
    missing_since_ms: int | None
    deletion_proved: bool


def delete_missing(
    config: ConfigFile,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC_ID|TOPIC]...", help="Ids or names of listed topics.")
    ] = None,
    older_than: Annotated[
        int | None,
        typer.Option(
            "--older-than",
            parser=duration_ms,
            metavar="DURATION",
            help="All topics that are missing for so long, for example 7d.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it, nothing is written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists tiered topics that no broker knows.

    Exit code 1: the deletion of a topic is not proved. The owners then keep its remote data until an operator says that
    the topic was deleted. With topics or --older-than, the command shows these topics, and --yes records that they were
    deleted. The owners then delete their remote data, which cannot be restored afterwards."""
    if yes and not topics and older_than is None:
        raise typer.BadParameter("name topics, or say --older-than")
    if older_than == 0:
        raise typer.BadParameter("--older-than: a duration above 0 is needed, for example 7d")
    settings = load_config(config)
    found = _run(settings, ())
    if not topics and older_than is None:
        _show(found, as_json)
        if not all(each.deletion_proved for each in found):
            raise typer.Exit(FINDINGS)
        return
    chosen = [] if older_than is None else _unproved_for(found, older_than)
    for topic in dict.fromkeys(topics or ()):
        named = [each for each in found if topic in (each.topic_id, each.topic)]
        if len(named) != 1:
            raise UnknownTargetError(_not_one(topic, named))
        chosen += [each for each in named if each not in chosen]
    if yes and chosen:
        ids = [UUID(each.topic_id) for each in chosen]
        chosen = [each for each in _run(settings, ids) if UUID(each.topic_id) in ids]
    _show(chosen, as_json)
    if not chosen and older_than is not None:
        least = duration_text(older_than)
        say(f"Nothing was written: no topic without a proof is recorded as missing for {least}.")
    elif not yes:
        say("Nothing was written. Use --yes to write.")
    else:
        say(
            "The deletion was written. The owners delete the remote data of these topics when no broker has known them"
            " for remote.log.topic.deletion.delay.ms."
        )


def _unproved_for(found: Sequence[MissingTopic], least_ms: int) -> list[MissingTopic]:
    """Returns the topics without a proof of deletion that are recorded as missing for at least `least_ms`."""
    latest_ms = time.time_ns() // 1_000_000 - least_ms
    unproved = [each for each in found if not each.deletion_proved]
    return [each for each in unproved if each.missing_since_ms is not None and each.missing_since_ms <= latest_ms]


def _not_one(topic: str, named: Sequence[MissingTopic]) -> str:
    if named:
        return f"{topic} is the name of several missing topics; use an id: {', '.join(each.topic_id for each in named)}"
    return f"{topic} is not missing: a broker knows it, or the remote tier has nothing of it"


def _run(settings: TidegateConfig, deleted: Collection[UUID]) -> list[MissingTopic]:
    return run_command(lambda: read_missing_topics(settings, deleted))


def _show(found: Sequence[MissingTopic], as_json: bool) -> None:
    if as_json:
        show_json(found)
        return
    headings = ("topic", "id", "partitions", "segments", "bytes", "missing since", "deletion")
    rows = [
        (
            each.topic,
            each.topic_id,
            each.partitions,
            each.segments,
            each.size_bytes,
            time_text(each.missing_since_ms),
            _deletion_text(each),
        )
        for each in found
    ]
    show_table(headings, rows, ("partitions", "segments", "bytes"))


def _deletion_text(topic: MissingTopic) -> str:
    return "proved" if topic.deletion_proved else "not proved: an operator must decide"


async def read_missing_topics(config: TidegateConfig, deleted: Collection[UUID]) -> list[MissingTopic]:
    """Records the topics in `deleted` as deleted. Then returns the missing topics.

    Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, _), metadata_to_now(config, client, progress=TERMINAL) as log:
        known = {each.topic_id for each in (*log.state.partitions(), *log.state.topics_with_tier_config())}
        gone = await ClusterTopicExistence(client).gone(known, TIMEOUT_MS) if known else set()
        for topic_id in deleted:
            if topic_id not in gone:
                raise RemoteTierError(f"a broker knows the topic {topic_id}, or the remote tier has none of it")
            name = next(each.topic for each in topics_of(log.state, {topic_id}))
            await RemoteLogMetadataManager(log).put_topic_deletion(topic_id, name, is_confirmed=True)
        return missing_of(log.state, gone)


def topics_of(metadata: RemoteLogMetadataState, topic_ids: Collection[UUID]) -> list[TopicIdPartition]:
    """Returns partition 0 of each of `topic_ids` that the metadata knows, sorted by name."""
    known = (*metadata.topics_with_tier_config(), *metadata.partitions())
    names = {each.topic_id: each.topic for each in known if each.topic_id in topic_ids}
    found = [TopicIdPartition(topic_id, 0, name) for topic_id, name in names.items()]
    return sorted(found, key=lambda each: (each.topic, str(each.topic_id)))


def missing_of(metadata: RemoteLogMetadataState, gone: Collection[UUID]) -> list[MissingTopic]:
    """Returns the answer's lines for the topics in `gone`, which no broker knows."""
    partitions, proved = metadata.partitions(), deleted_topics(metadata)
    lines = []
    for topic in topics_of(metadata, gone):
        own = [each for each in partitions if each.topic_id == topic.topic_id]
        segments = [segment for each in own for segment in metadata.list_remote_log_segments(each)]
        lines.append(
            MissingTopic(
                topic=topic.topic,
                topic_id=str(topic.topic_id),
                partitions=len(own),
                segments=len(segments),
                size_bytes=sum(each.segment_size_bytes for each in segments),
                missing_since_ms=metadata.missing_topics().get(topic.topic_id),
                deletion_proved=topic.topic_id in proved,
            )
        )
    return lines
