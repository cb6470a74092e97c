"""What the handlers of both tiers share: the cluster as they need to know it, their settings, and their tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from protocol.addresses import Address
from protocol.apis.topic_reference import TopicReference
from protocol.header import parse_request_header
from proxy.exchange import Request
from proxy.local_log_bounds import LocalLogBoundsCache
from proxy.tiered_partitions import TieredPartitions
from tiers.log.log_history import LogStartConfirmation
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteLogReader

KIB = 1024
MIB = 1024 * KIB

Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
"""Starts a task in the server's group; the coroutine may raise nothing but CancelledError."""


class Topology(Protocol):
    """Topics and addresses as Metadata named them last."""

    def topic_id(self, name: str, max_age_ms: int | None = None) -> UUID | None:
        """None when the name is not known, or was learned more than `max_age_ms` ago. Never waits."""

    async def resolve_topic_id(self, name: str, max_age_ms: int, timeout_ms: int) -> UUID | None:
        """As the cluster names it now, or did at most `max_age_ms` ago; None without such a topic or an answer."""

    async def current_topic_ids(
        self, names: Collection[str], node_id: int | None, timeout_ms: int
    ) -> Mapping[str, UUID]:
        """As that broker (None: any) names them, asked after this call; a name that is missing has no topic.

        A broker hears of a topic before it answers for its log, so what it answered before this call, it answered for
        no later topic of the name. Raises `BrokerError`."""

    def topic_name(self, topic_id: UUID) -> str | None: ...

    def advertised_address(self, node_id: int) -> Address | None:
        """Where clients reach that broker through this proxy; None for a node that is not known."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    hold_bytes: int = 256 * KIB
    """Responses up to this size are held and fully patched; larger ones stream."""
    fetch_max_bytes: int = 55 * MIB
    """What one request may ask of the remote tier, whatever its own MaxBytes: fetch.max.bytes, a broker's default."""
    hold_budget_bytes: int = 64 * MIB
    """What all held responses of requests with remote partitions may take together."""
    remote_fetch_max_wait_ms: int = 5_000
    """remote.fetch.max.wait.ms: how long a request for remote partitions alone may wait, if its own wait is shorter."""
    visibility_ms: int = 10_000
    """T_vis (DESIGN, safety rule 1)."""
    metadata_timeout_ms: int = 2_000
    bounds_timeout_ms: int = 2_000
    bounds_max_age_ms: int = 1_000
    topic_id_max_age_ms: int = 1_000
    local_poll_ms: int = 100
    """A slice of the second long poll: what a request that became complete meanwhile may have to wait at most."""
    list_offsets_timeout_ms: int = 15_000
    """remote.list.offsets.request.timeout.ms, capped below the clients' request timeouts."""

    @property
    def metadata_max_age_ms(self) -> int:
        return self.visibility_ms // 2


@dataclass(frozen=True, slots=True)
class HandlerTools:
    topology: Topology
    tiered: TieredPartitions
    bounds: LocalLogBoundsCache
    log_starts: LogStartConfirmation
    reader: RemoteLogReader
    settings: FetchSettings
    clock_ms: Callable[[], int]
    spawn: Spawn


def client_id_of(request: Request) -> str:
    """For quotas: clients choose it."""
    return parse_request_header(request.frame).client_id or ""


async def current_partition(tools: HandlerTools, topic: TopicReference, index: int) -> TopicIdPartition | None:
    """What the cluster means by it now: a topic that was recreated under its name is another one (semantics 9.3)."""
    if isinstance(topic, UUID):
        return TopicIdPartition(topic, index)
    settings, topology = tools.settings, tools.topology
    topic_id = topology.topic_id(topic, settings.topic_id_max_age_ms)
    if topic_id is None:
        topic_id = await topology.resolve_topic_id(topic, settings.topic_id_max_age_ms, settings.metadata_timeout_ms)
    return None if topic_id is None else TopicIdPartition(topic_id, index, topic)
