"""`tidegate tier retention`: shows the total retention of a topic, and records another one if the operator confirms it.

A shorter total deletes records that exist nowhere else. So the command first shows what would expire, and writes only
with `--yes`. It deletes nothing itself. The owners of the partitions, which are running `tidegate serve` processes,
expire the segments in their next rounds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from proxy.cluster.broker_configs import BrokerConfigs
from proxy.commands.tier.tools import check_topic, run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import TIMEOUT_MS, RemoteTierError, metadata_to_now, tiered_cluster
from tiers.commands.console import TERMINAL, AsJson, ConfigFile, say, show_json, show_table, time_text
from tiers.config.topic_policy import TopicConfig
from tiers.config.topic_settings import InvalidTierConfigError, check_tier_config
from tiers.config.total_retention import MAX_MINUTES, UNLIMITED, Retention, TotalRetention, recorded_total
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager, RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.tasks.retention.expiration_task import expired_to
from tiers.texts import size_text

Minutes = Annotated[
    int | None,
    typer.Option("--minutes", min=UNLIMITED, max=MAX_MINUTES, help="remote.log.retention.minutes; -1: unlimited."),
]
Bytes = Annotated[
    int | None, typer.Option("--bytes", min=UNLIMITED, help="remote.log.retention.bytes per partition; -1: unlimited.")
]


@dataclass(frozen=True, slots=True)
class PartitionExpiry:
    """The segments of one partition that the retention no longer covers. `newest_ms` is their newest timestamp."""

    partition: int
    log_start_offset: int
    segments: int
    size_bytes: int
    newest_ms: int | None


@dataclass(frozen=True, slots=True)
class RetentionChange:
    """The total retention of a topic before and after the change, and what expires by the total after it.

    The owners do not know yet how many bytes are only local, so more may expire by size. `file` is what the settings
    file of this command has for the topic."""

    topic: str
    broker: str
    file: str
    recorded: str
    wanted: str
    total_before: str
    total_after: str
    expires: tuple[PartitionExpiry, ...]
    differs_from_file: bool
    """Whether the file contradicts the total after the change. Then nothing of the topic expires."""
    changes: bool


def retention(
    config: ConfigFile,
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    minutes: Minutes = None,
    size_bytes: Bytes = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it, nothing is written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows or changes the total retention of a topic over both tiers.

    Shows what expires by the new total. An expired record cannot be restored: the brokers do not have it any more. Once
    one of the two options was recorded, the broker's retention.* bounds only the local tier, and a key that was never
    recorded is unlimited."""
    settings = load_config(config)
    check_topic(topic)
    wanted = TotalRetention(minutes, size_bytes)
    found = run_command(lambda: change_retention(settings, topic, wanted, yes))
    if as_json:
        show_json(found)
    else:
        show_table(
            ["topic", "broker", "file", "recorded", "total"],
            [(found.topic, found.broker, found.file, found.recorded, found.total_before)],
        )
        if found.changes:
            typer.echo(f"New total: {found.total_after} ({found.wanted}).")
        rows = [
            (
                f"{topic}-{each.partition}",
                each.segments,
                size_text(each.size_bytes),
                each.log_start_offset,
                time_text(each.newest_ms),
            )
            for each in found.expires
        ]
        typer.echo("By this total, these segments expire:" if rows else "By this total, no segment expires now.")
        if rows:
            numbers = ("segments", "size", "new log start")
            show_table(["partition", "segments", "size", "new log start", "newest record"], rows, numbers)
    if found.differs_from_file:
        say(
            "The settings file has another total. While it does, nothing of the topic expires: change or remove the"
            " line in the files of all proxies."
        )
    if found.changes:
        say("The total was recorded." if yes else f"Nothing was written. Use --yes to write.{_warning(found)}")


def _warning(found: RetentionChange) -> str:
    return " Expired records cannot be restored." if found.expires else ""


async def change_retention(config: TidegateConfig, topic: str, wanted: TotalRetention, write: bool) -> RetentionChange:
    """Records the total when `write` is true. Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, cluster):
        known = cluster.topics.get(topic)
        if known is None or known.is_internal or topic.startswith("__"):
            raise RemoteTierError(f"the cluster has no topic {topic} that can be tiered")
        values = (await BrokerConfigs(client).of_topics([topic], TIMEOUT_MS)).get(topic)
        if values is None:
            raise RemoteTierError(
                f"the configuration of {topic} cannot be read: give the proxy DESCRIBE_CONFIGS on the topic"
            )
        broker = {key: each.value for key, each in values.items()}
        rule = next((rule for rule in config.topics if rule.matches(topic)), None)
        partitions = [TopicIdPartition(known.topic_id, number, topic) for number in sorted(known.partitions)]
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
            async with metadata_to_now(config, client, Path(folder), progress=TERMINAL) as metadata:
                return await apply_total(metadata, partitions, rule, broker, wanted, write=write)


async def apply_total(
    metadata: RemoteLogMetadataManager,
    partitions: list[TopicIdPartition],
    rule: TopicConfig | None,
    broker: Mapping[str, str],
    wanted: TotalRetention,
    *,
    write: bool,
    now_ms: int | None = None,
) -> RetentionChange:
    """Returns the change to the keys of `wanted`, and records it when `write` is true.

    `partitions` are all partitions of one topic. `broker` has the broker's values of `BROKER_DEFAULTS`. Raises
    `RemoteTierError` if the settings do not allow the change, or are not the ones that the answer is about."""
    topic, topic_id = partitions[0].topic, partitions[0].topic_id
    own = dict(metadata.topic_tier_config(topic_id))
    recorded = recorded_total(own)
    after = recorded_total(own | wanted.config())
    kept = Retention(int(broker["retention.ms"]), int(broker["retention.bytes"]))

    def check(before: Mapping[str, str]) -> None:
        if before != own:
            raise RemoteTierError(f"the settings of {topic} were changed meanwhile: run the command again")
        try:
            check_tier_config(rule, before, {**before, **wanted.config()}, broker)
        except InvalidTierConfigError as error:
            raise RemoteTierError(str(error)) from error

    changes = after != recorded
    if changes:
        check(own)
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    total = after.over(kept)
    expires = [_expiry(metadata, partition, total, now_ms) for partition in partitions]
    if changes and write:
        await metadata.change_topic_tier_config(topic_id, topic, wanted.config(), check)
    said = TotalRetention() if rule is None else rule.total_retention
    return RetentionChange(
        topic=topic,
        broker=str(kept),
        file=str(said),
        recorded=str(recorded),
        wanted=str(after),
        total_before=str(recorded.over(kept)),
        total_after=str(total),
        expires=tuple(each for each in expires if each.segments),
        differs_from_file=said.contradicts(after),
        changes=changes,
    )


def _expiry(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, total: Retention, now_ms: int
) -> PartitionExpiry:
    log_start = metadata.log_start_offset(partition) or 0
    alive = list(metadata.answering_segments(partition, log_start))
    end = expired_to(alive, total, log_start, now_ms)
    expired = [segment for segment in alive if segment.valid_end_offset < end]
    return PartitionExpiry(
        partition.partition,
        end,
        len(expired),
        sum(segment.retained_bytes for segment in expired),
        max((segment.max_timestamp_ms for segment in expired), default=None),
    )
