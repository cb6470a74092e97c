"""`tidegate tier pause` and `resume`: stop the work on one topic's remote tier for a while, and let it go on.

The pause is a tier setting of the topic in the metadata topic. So every proxy obeys it, and it survives restarts. A
copy or a trim in progress ends first. The owner reads the settings to their end right before each trim and expiry.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from proxy.commands.tier.tools import check_topic, run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import UnknownTargetError, metadata_to_now, tiered_cluster
from tiers.commands.console import TERMINAL, AsJson, ConfigFile, say, show_json, show_table
from tiers.config.topic_policy import NOT_NAMED, TierWork, TopicConfig, exclusion, managed_rule, paused_work
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition

_MEANINGS: Mapping[TierWork, str] = {
    TierWork.COPYING: "no record is copied; the broker's own retention goes on, and may remove records uncopied",
    TierWork.TRIMMING: "the brokers keep copied records, and fill",
    TierWork.EXPIRING: "no remote segment is deleted by retention",
    TierWork.READING: "clients get an error that they retry for remote offsets, and for searches by timestamp",
}
_OF_DELETIONS = {TierWork.TRIMMING, TierWork.EXPIRING}
Topic = Annotated[str, typer.Argument(metavar="TOPIC")]
Copying = Annotated[bool, typer.Option("--copying", help="Copying to the store.")]
Trimming = Annotated[bool, typer.Option("--trimming", help="Trimming of the brokers' logs.")]
Expiring = Annotated[bool, typer.Option("--expiring", help="Expiry by the total retention.")]
Reading = Annotated[bool, typer.Option("--reading", help="Reads of clients from the remote tier.")]
Yes = Annotated[bool, typer.Option("--yes", help="Write. Without it, nothing is written.")]


@dataclass(frozen=True, slots=True)
class PauseChange:
    """The paused work of a topic before and after the change."""

    topic: str
    before: tuple[TierWork, ...]
    after: tuple[TierWork, ...]
    not_tiered: str | None = None
    """Why no setting tiers the topic; None: one does."""

    @property
    def changes(self) -> bool:
        return self.before != self.after


def pause(
    config: ConfigFile,
    topic: Topic,
    copying: Copying = False,
    trimming: Trimming = False,
    expiring: Expiring = False,
    reading: Reading = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Pauses the work on a topic's remote tier.

    Without options: copying, trimming and expiring. Clients go on reading, unless --reading is named."""
    chosen = _chosen(copying, trimming, expiring, reading)
    work = chosen or {TierWork.COPYING, TierWork.TRIMMING, TierWork.EXPIRING}
    _run(config, topic, work, is_paused=True, write=yes, as_json=as_json)


def resume(
    config: ConfigFile,
    topic: Topic,
    copying: Copying = False,
    trimming: Trimming = False,
    expiring: Expiring = False,
    reading: Reading = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Ends the pause of the work on a topic's remote tier. Without options: all of it."""
    work = _chosen(copying, trimming, expiring, reading) or set(TierWork)
    _run(config, topic, work, is_paused=False, write=yes, as_json=as_json)


def _chosen(copying: bool, trimming: bool, expiring: bool, reading: bool) -> set[TierWork]:
    return {work for work, is_named in zip(TierWork, (copying, trimming, expiring, reading), strict=True) if is_named}


def _run(config: Path, topic: str, work: Collection[TierWork], *, is_paused: bool, write: bool, as_json: bool) -> None:
    settings = load_config(config)
    check_topic(topic)
    found = run_command(lambda: change_pause(settings, topic, work, is_paused=is_paused, write=write))
    if as_json:
        show_json(found)
    else:
        rows = [
            (work.value, _state(work in found.before), _state(work in found.after), _MEANINGS[work])
            for work in TierWork
        ]
        show_table(["work", "now", "then", "a pause means"], rows)
    if found.not_tiered is not None:
        say(f"warning: {topic} is not tiered: {found.not_tiered}")
    if not found.changes:
        say("Nothing to change.")
    elif write and found.not_tiered is not None:
        say(f"The change of {topic} was recorded.")
    elif write:
        say(f"The change of {topic} was recorded. {_obeyed(work)}")
    else:
        say("Nothing was written. Use --yes to write.")


def _obeyed(work: Collection[TierWork]) -> str:
    """Returns who obeys a change of this work, and when."""
    who = "Every proxy obeys" if TierWork.READING in work else "The owners obey"
    before = " The owners also obey it before each trim and expiry." if _OF_DELETIONS & {*work} else ""
    return f"{who} it within 10 s.{before}"


def _state(is_paused: bool) -> str:
    return "paused" if is_paused else "runs"


async def change_pause(
    config: TidegateConfig, topic: str, work: Collection[TierWork], *, is_paused: bool, write: bool
) -> PauseChange:
    """Records the change when `write` is true. Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, cluster):
        known = cluster.topics.get(topic)
        if known is None or known.is_internal or topic.startswith("__"):
            raise UnknownTargetError(f"the cluster has no topic {topic} that can be tiered")
        async with metadata_to_now(config, client, progress=TERMINAL) as log:
            partition = TopicIdPartition(known.topic_id, 0, topic)
            metadata = RemoteLogMetadataManager(log)
            return await apply_pause(metadata, partition, config.topics, work, is_paused=is_paused, write=write)


async def apply_pause(
    metadata: RemoteLogMetadataManager,
    partition: TopicIdPartition,
    rules: Sequence[TopicConfig],
    work: Collection[TierWork],
    *,
    is_paused: bool,
    write: bool,
) -> PauseChange:
    """Returns the change to the topic of `partition`, and records it when `write` is true."""
    topic, own = partition.topic, metadata.state.topic_tier_config(partition.topic_id)
    not_tiered = None
    if managed_rule(topic, rules, own) is None:
        not_tiered = exclusion(topic, rules, own) or NOT_NAMED
    before = paused_work(own)
    after = before | set(work) if is_paused else before - set(work)
    if write and after != before:
        changes = {each.key: "true" if is_paused else None for each in work}
        await metadata.change_topic_tier_config(partition.topic_id, topic, changes)
    return PauseChange(topic, tuple(sorted(before)), tuple(sorted(after)), not_tiered)
