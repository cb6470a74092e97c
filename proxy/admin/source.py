"""What the page and the API ask: `TierFacts` of one process, and `FactSource` of a whole proxy.

Every process answers what it knows (`OwnFacts`), and the supervisor puts the answers together
(`proxy/process/admin/facts_of_all.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from proxy.admin.cluster_view import ClusterView
from proxy.admin.counts import ProcessReport
from proxy.admin.facts import (
    ClusterFacts,
    ErrorLine,
    ErrorsPage,
    Overview,
    PartitionPage,
    RaisedAlarm,
    ReaderLine,
    ReadersPage,
    SettingsPage,
    TopicPage,
    TopicQuery,
    TopicsPage,
)
from proxy.admin.tier_view import TierView
from proxy.wire.error_log import Incident
from tiers.errors import RemoteLogError
from tiers.reader.read_accounts import MAX_CLIENTS, ReadAccounts
from tiers.tasks.alarms import ActiveAlarm

MAX_ALARMS = 200
_NOT_OPEN = "the remote tier is not open yet"


class FactsUnavailableError(Exception):
    """The facts are not known now. The message is for the reader of the page."""


class TierFacts(Protocol):
    """Every method raises `FactsUnavailableError`."""

    async def topics(self, query: TopicQuery) -> TopicsPage: ...

    async def topic(self, name: str, page: int) -> TopicPage | None: ...

    async def partition(self, name: str, number: int, from_offset: int) -> PartitionPage | None: ...

    async def readers(self) -> ReadersPage: ...

    async def errors(self) -> ErrorsPage: ...


class FactSource(TierFacts, Protocol):
    async def overview(self) -> Overview: ...

    async def settings(self) -> SettingsPage: ...


@dataclass(slots=True)
class OwnParts:
    """The parts of a process that know facts. A role sets them when it opens them."""

    tier: TierView | None = None
    cluster: ClusterView | None = None
    accounts: ReadAccounts | None = None
    report: Callable[[], ProcessReport] = field(default=lambda: ProcessReport(os.getpid()))


class OwnFacts:
    """Implements `TierFacts` with what one process knows. `clock_ms` is monotonic."""

    def __init__(
        self,
        parts: OwnParts,
        incidents: Callable[[], Sequence[Incident]],
        *,
        clock_ms: Callable[[], int],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._parts = parts
        self._incidents = incidents
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms

    async def report(self) -> ProcessReport:
        return self._parts.report()

    async def cluster(self) -> ClusterFacts:
        """Raises `FactsUnavailableError`."""
        if self._parts.cluster is None:
            raise FactsUnavailableError(_NOT_OPEN)
        try:
            look = await self._tier.look()
        except RemoteLogError:
            look = None
        return await self._parts.cluster.facts(look)

    @property
    def _tier(self) -> TierView:
        if self._parts.tier is None:
            raise FactsUnavailableError(_NOT_OPEN)
        return self._parts.tier

    async def topics(self, query: TopicQuery) -> TopicsPage:
        try:
            return await self._tier.topics(query)
        except RemoteLogError as error:
            raise FactsUnavailableError(str(error)) from error

    async def topic(self, name: str, page: int) -> TopicPage | None:
        try:
            return await self._tier.topic(name, page)
        except RemoteLogError as error:
            raise FactsUnavailableError(str(error)) from error

    async def partition(self, name: str, number: int, from_offset: int) -> PartitionPage | None:
        try:
            return await self._tier.partition(name, number, from_offset)
        except RemoteLogError as error:
            raise FactsUnavailableError(str(error)) from error

    async def readers(self) -> ReadersPage:
        accounts, now_ms, wall_ms = self._parts.accounts, self._clock_ms(), self._wall_clock_ms()
        if accounts is None:
            raise FactsUnavailableError(_NOT_OPEN)
        lines = [
            ReaderLine(
                client_id=each.client_id,
                topic=each.topic,
                bytes=each.size_bytes,
                bytes_per_second=each.bytes_per_second(now_ms),
                reads=each.reads,
                throttled=each.throttled,
                cache_hits=each.cache_hits,
                last_ms=wall_ms - (now_ms - each.last_ms),
            )
            for each in accounts.accounts()
        ]
        lines.sort(key=lambda each: (-each.bytes_per_second, -each.bytes, each.client_id, each.topic))
        return ReadersPage(wall_ms, MAX_CLIENTS, tuple(lines))

    async def errors(self) -> ErrorsPage:
        return ErrorsPage(tuple(ErrorLine(**asdict(each)) for each in self._incidents()))


def raised(alarms: Iterable[ActiveAlarm]) -> list[RaisedAlarm]:
    """Joins the alarms of the partitions of a topic. The first of them gives the detail."""
    joined: dict[tuple[str, str], list[ActiveAlarm]] = {}
    for alarm in alarms:
        joined.setdefault((str(alarm.reason), alarm.topic), []).append(alarm)
    found = []
    for (name, topic), each in sorted(joined.items()):
        partitions = {alarm.about.partition(" ")[0] for alarm in each}  # a stage follows its partition
        about = topic if len(partitions) == 1 else f"{topic}, {len(partitions)} partitions"
        detail = ": ".join(filter(None, (each[0].about, each[0].detail)))
        peers = {alarm.waits_for for alarm in each}
        found.append(RaisedAlarm(name, about, detail, waits_for=peers.pop() if len(peers) == 1 else None))
    return found
