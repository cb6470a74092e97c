"""The interfaces, settings, services and error codes that the handlers of both tiers share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from opentelemetry.trace import Tracer

from protocol.api_keys import ApiKey
from protocol.apis.topic_reference import TopicReference
from protocol.errors import ErrorCode
from protocol.header import parse_request_header
from proxy.cluster.configured_topics import ConfiguredTopics, NothingConfigured
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.config import LimitsConfig
from proxy.handlers.fetch.delayed import WaitingReads
from proxy.wire.exchange import Request, Spawn
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import is_internal
from tiers.errors import RemoteLogError, RemoteReadTimeoutError, RetriableRemoteStorageError
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogSource
from tiers.reader.remote_reads import RemoteReads
from tiers.two_tier_log import TwoTierLog

KIB = 1024
MIB = 1024 * KIB

NOTHING_CONFIGURED = NothingConfigured()
NOT_KNOWN_NOW: Final[Mapping[ApiKey, ErrorCode]] = {
    ApiKey.FETCH: ErrorCode.REPLICA_NOT_AVAILABLE,
    ApiKey.LIST_OFFSETS: ErrorCode.REPLICA_NOT_AVAILABLE,  # the local tier's later offset would be a wrong answer
    ApiKey.DELETE_RECORDS: ErrorCode.REQUEST_TIMED_OUT,  # as a broker answers if a replica does not respond in time
}
"""The error code of each API for `NotKnownNow`, and for every other error of the remote log.

See docs/semantics.md 3.5, 5.2 and 9.1. An unavailable partition gets REPLICA_NOT_AVAILABLE, because every client
retries that error silently. Sarama does too, but hands KAFKA_STORAGE_ERROR to the application. The error is never
OFFSET_OUT_OF_RANGE, which makes consumers jump, nor a code that ends an application's poll loop."""

UNAVAILABLE: Final = NOT_KNOWN_NOW[ApiKey.FETCH]


class ClusterTopology(Protocol):
    """The topics of the cluster that clients use."""

    def topic_id(self, name: str, max_age_ms: int | None = None) -> UUID | None:
        """Returns the known id of a topic. None: the name is unknown or was learned more than `max_age_ms` ago.

        Any thread may call it."""

    def use_topic(self, topic: TopicReference) -> None:
        """Notes that a broker has answered for the topic to a client. Its id is then kept, and an unknown one learned.

        Before the broker's answer no client may cause a call, because this changes what the proxy knows for others."""

    async def resolve_topic_id(self, name: str, max_age_ms: int, timeout_ms: int) -> UUID | None:
        """Returns the topic's id in an answer of the cluster that is at most `max_age_ms` old.

        None: no such topic exists, or the cluster did not answer in time."""

    async def current_topic_ids(
        self, names: Collection[str], node_id: int | None, timeout_ms: int
    ) -> Mapping[str, UUID]:
        """Asks broker `node_id` (None: any broker) for the ids of the topics. A missing name has no topic.

        A broker learns of a topic before it answers requests for the topic's log. Therefore an answer that the broker
        gave before this call is not about a topic that was created later under the same name. Raises `BrokerError`."""

    async def all_topic_ids(self, names: Collection[str], timeout_ms: int) -> Mapping[str, Collection[UUID]]:
        """Asks every broker that can be reached for the ids of the topics: one may know a topic that is deleted.

        Raises `BrokerError` if no broker answers."""

    def topic_name(self, topic_id: UUID) -> str | None:
        """Returns the topic's latest known name. Any thread may call it."""

    async def resolve_topic_name(self, topic_id: UUID, timeout_ms: int) -> str | None:
        """Returns the topic's latest known name, or asks the cluster for it.

        None: no such topic exists. Raises `BrokerError` when the cluster does not answer."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """The settings of the handlers: those of the file, and those that only code sets."""

    remote_log: RemoteLogConfig = field(default_factory=RemoteLogConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    hold_bytes: int = 256 * KIB
    """The largest response that is held and fully patched. Larger responses are streamed."""
    fetch_max_bytes: int = 55 * MIB
    """The most bytes that one request gets, whatever its own MaxBytes. The default is a broker's fetch.max.bytes."""
    metadata_timeout_ms: int = 2_000
    bounds_timeout_ms: int = 2_000
    bounds_max_age_ms: int = 1_000
    watermarks_max_age_ms: int = 30_000
    """The age of the high watermark in remote answers, after which the leader is asked again.

    Clients compute their lag from it."""
    topic_id_max_age_ms: int = 1_000
    list_offsets_timeout_ms: int = 15_000
    """The deadline of a look-up by timestamp in the remote tier."""
    local_poll_ms: int = 100
    """The length of one slice of the second long poll.

    A response that becomes complete during a slice waits at most until the slice ends."""

    @property
    def metadata_max_age_ms(self) -> int:
        return self.remote_log.fresh_within_ms


@dataclass(frozen=True, slots=True)
class HandlerTools:
    topology: ClusterTopology
    metadata: FreshMetadata
    bounds: LocalLogBoundsCache
    source: LogSource
    reader: RemoteReads
    settings: FetchSettings
    clock_ms: Callable[[], int]
    spawn: Spawn
    configured: ConfiguredTopics | NothingConfigured = NOTHING_CONFIGURED
    tracer: Tracer | None = None
    """None: there are no traces."""
    log: TwoTierLog = field(init=False)
    waiting: WaitingReads = field(init=False)
    """The reads of Fetches."""

    def __post_init__(self) -> None:
        log = TwoTierLog(
            self.metadata,
            self.source,
            self._recent_bounds,
            max_age_ms=self.settings.metadata_max_age_ms,
            timeout_ms=self.settings.bounds_timeout_ms,
        )
        object.__setattr__(self, "log", log)
        object.__setattr__(self, "waiting", WaitingReads(self.reader, self.clock_ms))

    async def _recent_bounds(self, partition: TopicIdPartition) -> LocalLogBounds:
        not_before_ms = self.clock_ms() - self.settings.bounds_max_age_ms
        return (await self.bounds.ask(partition, not_before_ms, self.settings.bounds_timeout_ms)).bounds


def client_id_of(request: Request) -> str:
    """Returns the request's client id, which quotas use. Clients choose it freely."""
    return parse_request_header(request.frame).client_id or ""


def is_of_internal_topic(tools: HandlerTools, topic: TopicReference) -> bool:
    """Whether no setting of any proxy can tier the topic. False while its name is unknown here."""
    name = tools.topology.topic_name(topic) if isinstance(topic, UUID) else topic
    return name is not None and is_internal(name)


def named_partition(tools: HandlerTools, topic_id: UUID, index: int) -> TopicIdPartition:
    """Returns the partition with the latest known name of its topic, which is empty while the name is unknown."""
    return TopicIdPartition(topic_id, index, tools.topology.topic_name(topic_id) or "")


async def current_partition(tools: HandlerTools, topic: TopicReference, index: int) -> TopicIdPartition | None:
    """Returns the partition that the cluster has now under this topic reference. None: no such topic is known.

    The broker has answered for the topic. One that was recreated under the same name is another topic
    (docs/semantics.md 9.3)."""
    tools.topology.use_topic(topic)
    if isinstance(topic, UUID):
        return named_partition(tools, topic, index)
    settings, topology = tools.settings, tools.topology
    topic_id = topology.topic_id(topic, settings.topic_id_max_age_ms)
    if topic_id is None:
        topic_id = await topology.resolve_topic_id(topic, settings.topic_id_max_age_ms, settings.metadata_timeout_ms)
    return None if topic_id is None else TopicIdPartition(topic_id, index, topic)


def fetch_error(error: RemoteLogError) -> ErrorCode:
    """Returns the error code for a partition whose remote read failed.

    If the store is slow or does not answer, the code is NONE: the client gets an empty partition and asks again. After
    an error, kafkajs sends no heartbeats, and gives up soon. An outage would then cost every group a rebalance. The
    function never returns OFFSET_OUT_OF_RANGE: the proxy only relays that error, after it has asked the leader."""
    cause = error.cause if isinstance(error, RemoteReadTimeoutError) else error
    return ErrorCode.NONE if cause is None or isinstance(cause, RetriableRemoteStorageError) else UNAVAILABLE
