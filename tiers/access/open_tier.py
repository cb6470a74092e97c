"""Opens the remote tier for programs that are no proxy: the cluster, the current metadata and the store.

`open_metadata` and `open_tier` only read: they create nothing and take no ownership. `owned_tier` gives a job the
ownership of the metadata partitions of its topics while it runs.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tiers.access.progress import SILENCE, Progress
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.config.managers import create_storage
from tiers.config.tier_config import ConfigError, TierConfig
from tiers.config.upstream_config import broker_client
from tiers.errors import BrokerError, RemoteLogError, RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import by_topic_id
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.locations import HOME, LocatedRemoteStorageManager, decode_location
from tiers.storage.object_key import parse_segment_key
from tiers.storage.remote_storage_manager import RemoteStorageManager

TIMEOUT_MS = 15_000
CLAIM_TIMEOUT_MS = 60_000
"""How long a job waits for its claims; longer than the group waits for a dead member."""
_LOOK_AGAIN_MS = 100


class RemoteTierError(Exception):
    """A command cannot go on until an operator changes something; the message says what to change."""


class UnknownTargetError(RemoteTierError):
    """The command line names a topic or a partition that is not there."""


@dataclass(frozen=True, slots=True)
class OpenMetadata:
    """The opened metadata of the tier, without its store. The state was current when it was opened."""

    config: TierConfig
    client: BrokerClient
    cluster: ClusterMetadata
    log: TopicBasedMetadataLog
    progress: Progress = SILENCE

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.log.state

    @property
    def metadata(self) -> RemoteLogMetadataManager:
        return RemoteLogMetadataManager(self.log)

    async def refresh(self) -> None:
        """Reads the metadata topic up to its current end."""
        await read_all(self.log.follower, self.log.topic, 0, TIMEOUT_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTier(OpenMetadata):
    """The opened tier. `storage` is open."""

    storage: LocatedRemoteStorageManager
    key_ring: KeyRing

    @property
    def cluster_id(self) -> str:
        """The cluster id in object keys."""
        return storage_cluster_id(self.config, self.cluster.cluster_id)


@asynccontextmanager
async def tiered_cluster(
    config: TierConfig, *, is_new: bool = False, reads_metadata: bool = True
) -> AsyncIterator[tuple[BrokerClient, ClusterMetadata]]:
    """Yields a client and the cluster's metadata.

    If `reads_metadata` is true, the metadata manager must be the topic-based one. Unless `is_new` is true, the metadata
    topic must then exist. Raises `RemoteTierError`, also for a `RemoteLogError` of the code in the context. The message
    has one line."""
    is_topic_based = config.remote_log.is_topic_based
    if reads_metadata and not is_topic_based:
        raise RemoteTierError(
            "this command reads the metadata topic, and remote.log.metadata.manager.class.name is "
            f"{config.remote_log.metadata_manager!r}: it only works with the topic-based metadata manager. Another"
            " manager's metadata belongs to `tidegate serve` alone; 'Without the metadata topic' in docs/storage.md"
            " says what to use instead"
        )
    client = broker_client(config.upstream)
    metadata_topic = config.remote_log.metadata_topic
    try:
        try:
            cluster = await client.topic_named(metadata_topic, TIMEOUT_MS, with_others=True)
        except BrokerError as error:
            servers = ", ".join(f"{host}:{port}" for host, port in config.upstream.bootstrap_servers)
            raise RemoteTierError(f"no broker answers at {servers}: {error}") from error
        if is_topic_based and metadata_topic not in cluster.topics and not is_new:
            # Opening the metadata manager would create the topic, but a command must only read.
            raise RemoteTierError(
                f"the cluster has no topic {metadata_topic}: either nothing was tiered yet, or the topic was lost (see"
                " 'The metadata topic is lost' in docs/recovery.md)"
            )
        yield client, cluster
    except RemoteLogError as error:
        raise RemoteTierError(str(error)) from error
    finally:
        await client.close()


@asynccontextmanager
async def metadata_to_now(
    config: TierConfig,
    client: BrokerClient,
    folder: Path | None = None,
    claims: frozenset[int] | None = None,
    refusal_to_create: Callable[[], Awaitable[str | None]] | None = None,
    progress: Progress = SILENCE,
) -> AsyncIterator[TopicBasedMetadataLog]:
    """Yields the metadata log, read up to its current end.

    No other process may use `folder`. None: a temporary one. With `claims`, this process joins the group that owns the
    metadata partitions, and claims these partitions."""
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-")))
        settings = TopicBasedSettings(
            folder,
            topic=config.remote_log.metadata_topic_settings,
            is_member=claims is not None,
            claims=claims,
            open_timeout_ms=TIMEOUT_MS,
            max_age_ms=config.remote_log.fresh_within_ms,
            refusal_to_create=refusal_to_create,
        )
        log = TopicBasedMetadataLog(client, settings)
        try:
            await log.open()
            with progress.count("records of the metadata topic", lambda: log.follower.events_read):
                await read_all(log.follower, log.topic, TIMEOUT_MS, TIMEOUT_MS)
            yield log
        finally:
            await log.close()


async def segments_without_metadata(config: TierConfig, cluster_id: str, storage: RemoteStorageManager) -> str | None:
    """Returns why new metadata must not be created: the store holds segments of this cluster. None if it may be.

    It lists the store, which no other check before the creation does. `cluster_id` is the one in object keys."""
    async for stored in storage.list_objects(""):
        segment = parse_segment_key(stored.key)
        if segment is not None and segment.cluster_id == cluster_id:
            if not config.remote_log.is_topic_based:
                return "the store holds segments of this cluster already, whose metadata is elsewhere"
            return (
                f"topic {config.remote_log.metadata_topic} is missing or has no record, but the store holds segments of"
                " this cluster: see 'The metadata topic is lost' in docs/recovery.md"
            )
    return None


@asynccontextmanager
async def open_metadata(config: TierConfig, progress: Progress = SILENCE) -> AsyncIterator[OpenMetadata]:
    """Yields the opened metadata. The store need not answer. Raises like `tiered_cluster`."""
    async with (
        tiered_cluster(config) as (client, cluster),
        metadata_to_now(config, client, progress=progress) as log,
    ):
        yield OpenMetadata(config, client, cluster, log, progress)


@asynccontextmanager
async def open_tier(config: TierConfig, progress: Progress = SILENCE) -> AsyncIterator[OpenTier]:
    """Yields the opened tier, without any ownership. Raises like `tiered_cluster`."""
    async with (
        tiered_cluster(config) as (client, cluster),
        open_storage(config, cluster.cluster_id) as storage,
        metadata_to_now(config, client, progress=progress) as log,
    ):
        yield OpenTier(config, client, cluster, log, progress, storage=storage, key_ring=open_key_ring(config))


@asynccontextmanager
async def open_storage(config: TierConfig, cluster_id: str) -> AsyncIterator[LocatedRemoteStorageManager]:
    """Yields the opened store. Raises `ConfigError` for invalid settings, and `RemoteTierError` for other errors."""
    if config.storage is None:
        raise RemoteTierError("there is no [storage]")
    name = config.storage.implementation
    try:
        storage = create_storage(config.storage, cluster_id)
    except ValueError as error:
        raise ConfigError(f"[storage] {name}: {error}") from error
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
        for each in tier.state.list_remote_log_segments(partition)
        if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    ]


def location_of(segment: RemoteLogSegmentMetadata) -> str:
    try:
        name, _ = decode_location(segment.custom_metadata)
    except RemoteLogError as error:
        return str(error)
    return "home" if name == HOME else name


def storage_cluster_id(config: TierConfig, cluster_id: str) -> str:
    """Returns the cluster id in object keys. The settings of the store may name another one than the cluster's own."""
    return cluster_id if config.storage is None else config.storage.plain_settings().get("cluster.id", cluster_id)


def open_key_ring(config: TierConfig) -> KeyRing:
    """Reads the encryption keys. Raises `ConfigError`."""
    try:
        return config.encryption.key_ring()
    except ValueError as error:
        raise ConfigError(f"[encryption] {error}") from error


async def read_all(follower: MetadataFollower, topic: MetadataTopic, max_age_ms: int, patience_ms: int) -> None:
    """Waits until every metadata partition is fresh, as `ensure_fresh` does, however many records the topic has.

    `ensure_fresh` is for callers that wait for a few records. A new state reads a million segments for minutes, so
    this function waits as long as more records arrive.

    Raises `RemoteLogMetadataNotReadyError` when no record arrived for `patience_ms`."""
    numbers = range(topic.partition_count)
    for number in numbers:
        while True:
            reached = sum(map(follower.position, numbers))
            try:
                await follower.ensure_fresh(number, max_age_ms, patience_ms)
                break
            except RemoteLogMetadataNotReadyError:
                if sum(map(follower.position, numbers)) == reached:
                    raise


@asynccontextmanager
async def owned_tier(
    config: TierConfig,
    choose: Callable[[OpenTier], Awaitable[Iterable[TopicIdPartition]]],
    timeout_ms: int = CLAIM_TIMEOUT_MS,
    *,
    is_new: bool = False,
    progress: Progress = SILENCE,
) -> AsyncIterator[OpenTier]:
    """Yields the tier once its `log` owns the metadata partitions of the partitions that `choose` returns.

    The job joins the consumer group of the proxies and claims those partitions. Meanwhile no proxy copies, trims,
    expires or deletes there, and the job's records are fenced like those of a proxy. When the job ends or its process
    dies, the proxies own the partitions again. If two jobs claim the same partition, one waits and then gives up.

    `choose` gets a tier that owns no partitions. If `is_new` is true and there is no metadata topic, the topic is
    created, unless the store already holds segments.

    Raises `RemoteTierError`, also when another process keeps the ownership for `timeout_ms`."""
    async with tiered_cluster(config, is_new=is_new) as (client, cluster):
        with tempfile.TemporaryDirectory(prefix="tidegate-") as name:
            folder = Path(name)
            cluster_id = storage_cluster_id(config, cluster.cluster_id)
            async with open_storage(config, cluster.cluster_id) as storage:
                refusal = partial(segments_without_metadata, config, cluster_id, storage)
                async with metadata_to_now(config, client, folder, None, refusal, progress) as log:
                    tier = OpenTier(
                        config, client, cluster, log, progress, storage=storage, key_ring=open_key_ring(config)
                    )
                    chosen = list(await choose(tier))
                    count = log.topic.partition_count
                claims = frozenset(by_topic_id(partition, count) for partition in chosen)
                # The folder has the metadata that was read so far, so the member continues from there.
                async with metadata_to_now(config, client, folder, claims) as log:
                    await _wait_until_owned(log, claims, timeout_ms)
                    yield replace(tier, log=log)


async def _wait_until_owned(log: TopicBasedMetadataLog, claims: frozenset[int], timeout_ms: int) -> None:
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while not claims <= (status := log.status()).owned_partitions:
                if status.alarm is not None:
                    raise RemoteTierError(status.alarm)
                await asyncio.sleep(_LOOK_AGAIN_MS / 1000)
    except TimeoutError as error:
        missing = sorted(claims - log.status().owned_partitions)
        raise RemoteTierError(
            f"the metadata partitions {', '.join(map(str, missing))} were not handed over in {timeout_ms} ms:"
            " another job runs on the same topics, or the consumer group keeps rebalancing; try again later"
        ) from error
