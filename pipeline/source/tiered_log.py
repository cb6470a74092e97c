"""`TieredLog`: what a reader may read now: its partitions, the bounds of each, and the tier that holds each offset.

The reader asks the leaders for the bounds with its own Kafka identity, first by a Fetch. A leader refuses a topic that
the identity may not read, before anything is read from the store. Without that request, `access=direct` would bypass
the brokers' ACLs. The metadata is read up to its end with the identity of the tier's file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from pipeline.config import PipelineConfig
from pipeline.source.options import EARLIEST, LATEST, Access, OptionError, Position, ReadOptions, Tier
from pipeline.source.read_plan import LogView, MissingOffsets, ReadRange, cover
from pipeline.worker import worker
from protocol.errors import ErrorCode
from tiers.access.open_tier import OpenTier, open_tier
from tiers.bounded_gather import bounded_gather
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError, NotKnownNow
from tiers.log.broker_log import BrokerLogSource, offsets_for_times
from tiers.metadata.log_history import confirms
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.stored_segment import StoredSegment
from tiers.reader.chunk_fetcher import Caller
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.texts import did_you_mean
from tiers.two_tier_log import TwoTierLog

logger = logging.getLogger(__name__)

TIMEOUT_MS = 60_000
_PARTITIONS_AT_ONCE = 512
_PAUSE_MS = 50


class AccessDeniedError(Exception):
    """The reader's Kafka identity may not read a topic."""


class DataLossError(Exception):
    """Offsets to be read no longer exist in either tier."""


@dataclass(frozen=True, slots=True)
class LogBounds:
    """`log_start` is the first readable offset of both tiers, `local_start` that of the leader. `end` is exclusive.

    `leader_epoch` is that of the leader; -1: it is not known."""

    log_start: int
    local_start: int
    end: int
    leader_epoch: int = field(default=-1, compare=False)


class TieredLog:
    """The log that a reader sees. `stack` closes what the log opens. If `tier_config` is None, no store is read."""

    def __init__(
        self, options: ReadOptions, client: BrokerClient, tier_config: PipelineConfig | None, stack: AsyncExitStack
    ) -> None:
        self._options = options
        self._client = client
        self._source = BrokerLogSource(client)
        self._tier_config = tier_config
        self._stack = stack
        self._tier: OpenTier | None = None
        self._log: TwoTierLog | None = None
        """The log of both tiers; None if no store is read."""
        self._local: dict[TopicIdPartition, LocalLogBounds] = {}
        """The last answers of the leaders."""
        self._topics: set[str] = set(options.subscription.topics_among(()))
        """Topics that were subscribed to by name or found before."""

    @property
    def cluster_id(self) -> str:
        """The cluster id in the store's object keys, after a call of `bounds`. Empty if no store is read."""
        return "" if self._tier is None else self._tier.cluster_id

    async def partitions(self) -> list[TopicIdPartition]:
        """Returns the subscription's current partitions. Raises `OptionError` for a topic or partition that does not
        exist, `AccessDeniedError` for a topic that the reader may not read."""
        metadata = await self._metadata()
        subscription = self._options.subscription
        found: list[TopicIdPartition] = []
        public = _public_topics(metadata)
        for name in subscription.topics_among(public):
            topic = metadata.topics.get(name)
            if topic is None or topic.error == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                nearest = did_you_mean(name, (known for known in public if known != name))
                raise OptionError(f"there is no topic {name}, or this reader may not describe it{nearest}")
            if topic.error == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                raise AccessDeniedError(f"not allowed to read the topic {name}")
            found += [TopicIdPartition(topic.topic_id, index, name) for index in sorted(topic.partitions)]
        self._topics = {one.topic for one in found}
        if not subscription.assigned:
            return found
        known = {(one.topic, one.partition): one for one in found}
        for topic_name, index in subscription.assigned:
            if (topic_name, index) not in known:
                raise OptionError(f"there is no partition {topic_name}-{index}")
        return [known[one] for one in dict.fromkeys(subscription.assigned)]

    async def topics(self) -> list[str]:
        """Returns the names of all topics that the reader may describe, without the brokers' internal ones."""
        return _public_topics(await self._metadata())

    async def _metadata(self) -> ClusterMetadata:
        """Returns current metadata from a broker that knows all topics that another broker knows. Brokers learn of a
        new topic one after the other, and a reader treats an unknown topic as lost."""
        deadline_ms = monotonic_ms() + TIMEOUT_MS
        while True:
            metadata = await self._client.metadata(TIMEOUT_MS)
            missing = next((name for name in self._topics if name not in metadata.topics), None)
            if missing is None or monotonic_ms() >= deadline_ms:
                return metadata
            if missing not in (await self._client.topic_named(missing, TIMEOUT_MS)).topics:
                return metadata
            await asyncio.sleep(_PAUSE_MS / 1000)

    async def bounds(self, partitions: Sequence[TopicIdPartition]) -> dict[TopicIdPartition, LogBounds]:
        """Returns the current bounds. Raises `AccessDeniedError`, `BrokerError`, and `OptionError` if the brokers are
        not those of the tier."""
        found = await bounded_gather(partitions, self._local_bounds, _PARTITIONS_AT_ONCE)
        # A new leader's high watermark may lie below the last one's for a moment, and Fetch returns it: records that
        # were already read would seem lost. ListOffsets waits until the new leader has caught up (KIP-207).
        ends = await offsets_for_times(
            self._client,
            dict.fromkeys(partitions, LATEST),
            is_committed_only=self._options.is_committed_only,
            timeout_ms=TIMEOUT_MS,
        )
        # Read the metadata only after the leaders have answered. A reader without permission was refused before this
        # point. Records that a leader has trimmed by now are in metadata that is read from here on.
        if self._tier is not None:
            await self._tier.refresh()
        elif self._tier_config is not None:
            tier = await self._stack.enter_async_context(open_tier(self._tier_config))
            await self._check_cluster(tier.cluster.cluster_id)
            max_age_ms = self._tier_config.remote_log.fresh_within_ms
            # Both or none: a call after a failed one must not take the local tier for all.
            self._tier = tier
            self._log = TwoTierLog(tier.log, self._source, self._read, max_age_ms=max_age_ms, timeout_ms=TIMEOUT_MS)
        return {
            partition: await self._with_remote(partition, local, ends[partition] or 0)
            for partition, local in zip(partitions, found, strict=True)
        }

    async def confirms(self, partition: TopicIdPartition, position: OffsetAndEpoch) -> bool:
        """Returns whether the leader's log had reached the position in its leader epoch. Raises `BrokerError`."""
        return await confirms(self._source, partition, position, TIMEOUT_MS)

    async def _read(self, partition: TopicIdPartition) -> LocalLogBounds:
        return self._local[partition]

    async def _check_cluster(self, of_tier: str) -> None:
        """Raises `OptionError` if the brokers are of another cluster. A proxy answers with its cluster's own id."""
        of_brokers = (await self._client.brokers(timeout_ms=TIMEOUT_MS)).cluster_id
        if of_brokers != of_tier:
            raise OptionError(
                f"kafka.bootstrap.servers is the cluster {of_brokers}, and the tier in config is of the cluster "
                f"{of_tier}: name brokers or a proxy of {of_tier}, omit kafka.bootstrap.servers to ask those of the "
                f"file, or read {of_brokers} with tier=local or with its own file"
            )

    async def _local_bounds(self, partition: TopicIdPartition) -> LocalLogBounds:
        try:
            return await self._source.bounds(partition, TIMEOUT_MS)
        except BrokerError as error:
            if error.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                raise AccessDeniedError(f"not allowed to read the topic {partition.topic}") from error
            raise

    async def _with_remote(self, partition: TopicIdPartition, local: LocalLogBounds, end: int) -> LogBounds:
        if self._log is None:
            return LogBounds(local.log_start_offset, local.log_start_offset, end, local.leader_epoch)
        remote = self._log.remote(partition)
        if self._options.tier is Tier.REMOTE:
            # The end is where the remote segments end. If there are none, it is where the next segment begins.
            end = min(end, remote.next_remote(local.log_start_offset))
            local = replace(local, log_start_offset=end)
        self._local[partition], local_start = local, local.log_start_offset
        try:
            log_start = await self._log.earliest(partition, local_start)
        except NotKnownNow as error:
            report_data_loss(self._options, str(error))
            log_start = remote.earliest(local_start)
        return LogBounds(
            min(local_start if log_start is None else log_start, end), local_start, end, local.leader_epoch
        )

    async def offsets(
        self, position: Position, bounds: Mapping[TopicIdPartition, LogBounds]
    ) -> dict[TopicIdPartition, int]:
        """Returns the offset of `position` for each partition of `bounds`. Raises `OptionError`."""
        wanted = self._each(position, bounds)
        if position.is_time:
            return await self._offsets_of_times(wanted, position, bounds)
        return {
            partition: {EARLIEST: bounds[partition].log_start, LATEST: bounds[partition].end}.get(offset, offset)
            for partition, offset in wanted.items()
        }

    @staticmethod
    def _each(position: Position, bounds: Mapping[TopicIdPartition, LogBounds]) -> dict[TopicIdPartition, int]:
        if position.default is not None:
            return dict.fromkeys(bounds, position.default)
        assigned = {(one.topic, one.partition): one for one in bounds}
        if assigned.keys() != position.each.keys():
            raise OptionError(
                "If starting or ending offsets are given by partition, you must specify all TopicPartitions. Use -1 "
                f"for latest, -2 for earliest. Specified: {sorted(position.each)} Assigned: {sorted(assigned)}"
            )
        return {assigned[name]: number for name, number in position.each.items()}

    async def _offsets_of_times(
        self,
        times_ms: Mapping[TopicIdPartition, int],
        position: Position,
        bounds: Mapping[TopicIdPartition, LogBounds],
    ) -> dict[TopicIdPartition, int]:
        found: dict[TopicIdPartition, int | None] = dict(await self._remote_times(times_ms, bounds))
        rest = {partition: time_ms for partition, time_ms in times_ms.items() if partition not in found}
        if self._options.tier is not Tier.REMOTE:
            found |= await offsets_for_times(
                self._client, rest, is_committed_only=self._options.is_committed_only, timeout_ms=TIMEOUT_MS
            )
            if self._tier is not None and rest:
                # The owner may have copied and trimmed a segment before a leader answered.
                await self._tier.refresh()
                found |= await self._remote_times(rest, bounds)
        offsets: dict[TopicIdPartition, int] = {}
        for partition, time_ms in times_ms.items():
            offset = found.get(partition)
            await self._report_hole(partition, bounds[partition], offset)
            if offset is None:
                if position.on_no_match == "error":
                    raise OptionError(f"No offset matched from request of topic-partition {partition} and {time_ms}.")
                offset = bounds[partition].end
            offsets[partition] = max(bounds[partition].log_start, min(offset, bounds[partition].end))
        return offsets

    async def _report_hole(self, partition: TopicIdPartition, bounds: LogBounds, answer: int | None) -> None:
        """Reports the first offsets below `answer` that neither tier has: they may have the time.

        Raises `DataLossError` if `failOnDataLoss` is true."""
        try:
            if self._log is not None:
                await self._log.require_no_hole(partition, bounds.log_start, -1 if answer is None else answer)
        except NotKnownNow as error:
            report_data_loss(self._options, str(error))

    async def _remote_times(
        self, times_ms: Mapping[TopicIdPartition, int], bounds: Mapping[TopicIdPartition, LogBounds]
    ) -> dict[TopicIdPartition, int]:
        tier = self._tier
        if tier is None or not times_ms:
            return {}
        async with RemoteLogReader(tier.log, tier.storage, ciphers=tier.key_ring) as reader:

            async def look_up(partition: TopicIdPartition) -> int | None:
                found = await reader.offset_for_timestamp(
                    partition,
                    times_ms[partition],
                    bounds[partition].log_start,
                    bounds[partition].end,
                    Caller(monotonic_ms() + TIMEOUT_MS, 0),
                )
                return None if found is None else found.offset

            partitions = list(times_ms)
            answers = await bounded_gather(partitions, look_up, 8)
        return {partition: offset for partition, offset in zip(partitions, answers, strict=True) if offset is not None}

    def ranges(
        self, partition: TopicIdPartition, bounds: LogBounds, first_offset: int, end_offset: int
    ) -> list[ReadRange | MissingOffsets]:
        """Returns what to read for `[first_offset, end_offset]` (inclusive). Logs each recorded gap in that range."""
        remote = None if self._tier is None else RemoteLog(self._tier.state, partition)

        def answering(offset: int) -> Iterable[StoredSegment]:
            return () if remote is None else remote.metadata.answering_segments(partition, offset)

        gaps = [] if remote is None else sorted(remote.gaps())
        for gap in gaps:
            first, end = max(first_offset, bounds.log_start, gap.first_offset), min(end_offset, gap.next_offset - 1)
            if first <= end:
                logger.warning("%s: the broker removed %d to %d before they were copied: a gap", partition, first, end)
        view = LogView(partition, bounds.log_start, bounds.local_start, answering, gaps)
        return list(cover(view, first_offset, end_offset))


def report_data_loss(options: ReadOptions, what: str) -> None:
    """Raises `DataLossError`, or logs a warning if `failOnDataLoss` is false."""
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{what}. Some data may have been lost because they are not available any more; either the data was aged "
            "out or the topic may have been deleted before all of it was read. To continue without these data, set the "
            "source option failOnDataLoss to false, or run the export with --allow-loss"
        )
    logger.warning("%s; failOnDataLoss is false", what)


def _public_topics(metadata: ClusterMetadata) -> list[str]:
    return [topic.name for topic in metadata.topics.values() if not topic.is_internal]


def client_config(options: ReadOptions) -> PipelineConfig:
    """Returns a configuration with only the reader's own cluster and identity."""
    return PipelineConfig.model_construct(upstream=options.kafka)


@asynccontextmanager
async def open_log(options: ReadOptions) -> AsyncIterator[TieredLog]:
    """Opens the log. It must run on the loop of this process's worker. Raises `RemoteTierError`, and what the block
    raises."""
    is_direct = options.access is Access.DIRECT and options.tier is not Tier.LOCAL
    async with AsyncExitStack() as stack:
        client = await worker().client(client_config(options))
        yield TieredLog(options, client, options.config if is_direct else None, stack)
