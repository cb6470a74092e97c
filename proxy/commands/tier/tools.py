"""The common parts of the `tidegate tier` commands: their arguments, and the event loop that they run on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from proxy.logging_setup import set_up_logging
from tiers.access.open_tier import OpenMetadata, UnknownTargetError
from tiers.event_loop import EventLoop
from tiers.model.ids import TopicIdPartition

T = TypeVar("T")

Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="How many segments to read at a time.")]
Target = Annotated[str, typer.Argument(metavar="TOPIC[:PARTITION]")]
OptionalTarget = Annotated[str | None, typer.Argument(metavar="[TOPIC[:PARTITION]]", help="Default: all topics.")]


def parse_target(target: str | None) -> tuple[str | None, int | None]:
    if target is None:
        return None, None
    topic, colon, number = target.partition(":")
    if not topic or (colon and not number.isdecimal()):
        raise typer.BadParameter(f"expected TOPIC or TOPIC:PARTITION, not {target!r}")
    return topic, int(number) if colon else None


def parse_partition(target: str) -> tuple[str, int]:
    """Raises `BadParameter` unless `target` is one partition."""
    topic, number = parse_target(target)
    if topic is None or number is None:
        raise typer.BadParameter(f"expected TOPIC:PARTITION, not {target!r}{_hint(target)}")
    return topic, number


def _hint(target: str) -> str:
    """Kafka's tools and log folders name a partition `topic-number`."""
    found = re.fullmatch(r"(.+)-(\d+)", target)
    return f". Did you mean {found[1]}:{found[2]}?" if found else ""


def check_topic(topic: str | None) -> None:
    """Raises `BadParameter` for a text with a partition. A topic's name has no colon."""
    if topic is not None and ":" in topic:
        raise typer.BadParameter(f"expected TOPIC without a partition, not {topic!r}")


def partitions_of(tier: OpenMetadata, target: str | None) -> list[TopicIdPartition]:
    """Returns the partitions of `target` that have metadata, sorted by name. None: all that have metadata.

    Raises `UnknownTargetError` if the metadata has nothing of `target`."""
    topic, number = parse_target(target)
    known = [
        each for each in tier.state.partitions() if topic in (None, each.topic) and number in (None, each.partition)
    ]
    if target is not None and not known:
        there = None if topic is None else tier.cluster.topics.get(topic)
        if there is None:
            raise UnknownTargetError(f"neither the cluster nor the remote tier has the topic {topic}{_hint(target)}")
        if number is not None and number not in there.partitions:
            raise UnknownTargetError(f"{topic} has no partition {number}: it has {len(there.partitions)}, from 0 on")
        raise UnknownTargetError(f"nothing of {target} is in the remote tier")
    return sorted(known, key=lambda each: (each.topic, each.topic_id, each.partition))


def run_command(work: Callable[[], Awaitable[T]]) -> T:
    set_up_logging("critical", "text")

    async def running() -> T:
        return await work()

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(running())
