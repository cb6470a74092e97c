"""What the commands of an operator have in common: how the tier is opened, how answers and progress are shown."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from proxy.commands.cluster import TIMEOUT_MS, metadata_to_now, tiered_cluster
from proxy.config import TidegateConfig
from proxy.logging_setup import set_up_logging
from proxy.remote_log import RemoteTierError, open_key_ring, storage_cluster_id
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import RemoteLogError
from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.locations import HOME, LocatedRemoteStorageManager, decode_location
from tiers.storage.registry import create_storage

T = TypeVar("T")
S = TypeVar("S")

FINDINGS = 1
MISUSED = 2
_WIDTH = 1_000
"""Of a table that goes into a file or a pipe: nothing is ever cut short."""

ConfigFile = Annotated[Path, typer.Option("--config", help="The TOML file; docs/configuration.md names every key.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="How many segments are read at a time.")]
Target = Annotated[str, typer.Argument(metavar="TOPIC[:PARTITION]")]
OptionalTarget = Annotated[str | None, typer.Argument(metavar="[TOPIC[:PARTITION]]", help="Everything without it.")]


@dataclass(frozen=True, slots=True)
class OpenTier:
    """`metadata` is as of now; `storage` is open."""

    config: TidegateConfig
    client: BrokerClient
    cluster: ClusterMetadata
    metadata: TopicBasedRemoteLogMetadataManager
    storage: LocatedRemoteStorageManager
    cluster_id: str
    """As object keys have it."""
    key_ring: KeyRing

    async def refresh(self) -> None:
        """What is read of the metadata from now on is as of now, or later."""
        for number in range(self.metadata.topic.partition_count):
            await self.metadata.follower.ensure_fresh(number, 0, TIMEOUT_MS)

    def partitions(self, target: str | None) -> list[TopicIdPartition]:
        """Of everything with metadata, by name. Raises `RemoteTierError` for a target that nothing is known of."""
        topic, number = parse_target(target)
        known = [
            each
            for each in self.metadata.partitions()
            if topic in (None, each.topic) and number in (None, each.partition)
        ]
        if target is not None and not known:
            raise RemoteTierError(f"nothing of {target} is in the remote tier")
        return sorted(known, key=lambda each: (each.topic, each.topic_id, each.partition))


def parse_target(target: str | None) -> tuple[str | None, int | None]:
    if target is None:
        return None, None
    topic, colon, number = target.partition(":")
    if not topic or (colon and not number.isdecimal()):
        raise typer.BadParameter(f"expected TOPIC or TOPIC:PARTITION, not {target!r}")
    return topic, int(number) if colon else None


def run_command(work: Callable[[], Awaitable[T]]) -> T:
    set_up_logging("critical", "text")

    async def running() -> T:
        return await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(running())


@asynccontextmanager
async def open_tier(config: TidegateConfig) -> AsyncIterator[OpenTier]:
    """Raises `RemoteTierError` in one line, of whatever is done in it too."""
    async with tiered_cluster(config) as (client, cluster):
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
            async with (
                open_storage(config, cluster.cluster_id) as storage,
                metadata_to_now(config, client, Path(folder)) as metadata,
            ):
                cluster_id = storage_cluster_id(config, cluster.cluster_id)
                yield OpenTier(config, client, cluster, metadata, storage, cluster_id, open_key_ring(config))


@asynccontextmanager
async def open_storage(config: TidegateConfig, cluster_id: str) -> AsyncIterator[LocatedRemoteStorageManager]:
    if config.storage is None:
        raise RemoteTierError("there is no [storage]")
    name = config.storage.implementation
    try:
        storage = create_storage(config.storage, cluster_id)
    except ValueError as error:
        raise RemoteTierError(f"[storage] {name}: {error}") from error
    try:
        try:
            await storage.open()
        except RemoteLogError as error:
            raise RemoteTierError(f"the store {name}: {error}") from error
        yield storage
    finally:
        await storage.close()


def readable_segments(tier: OpenTier, partition: TopicIdPartition) -> list[RemoteLogSegmentMetadata]:
    return [
        each
        for each in tier.metadata.list_remote_log_segments(partition)
        if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    ]


def location_of(segment: RemoteLogSegmentMetadata) -> str:
    try:
        name, _ = decode_location(segment.custom_metadata)
    except RemoteLogError as error:
        return str(error)
    return "home" if name == HOME else name


async def each_of(
    items: Iterable[S], work: Callable[[S], Awaitable[T]], at_once: int, done: Callable[[], None] = lambda: None
) -> list[T]:
    """In the order of `items`, at most `at_once` at a time. The first failure ends all, and comes out alone."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: S) -> T:
        async with slots:
            result = await work(item)
        done()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """On standard error, and only where somebody watches; gives what to call with every advance."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def say(text: str) -> None:
    """To whoever watches: standard output is the answer's."""
    typer.echo(text, err=True)


def show_json(answer: object) -> None:
    typer.echo(json.dumps(answer, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """`numbers` are the headings of columns that stand to the right. None is a dash."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        if heading in numbers:
            table.add_column(heading, justify="right")
        else:
            table.add_column(heading, overflow="fold")
    for row in rows:
        # As text: brackets of an error are no markup.
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH)).print(table)


def time_text(timestamp_ms: int | None) -> str | None:
    if timestamp_ms is None or timestamp_ms < 0:
        return None
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ms)
