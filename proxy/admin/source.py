"""`FactSource`: what the page and the API ask, and `OwnFacts`: the answers of one process.

Every process answers what it knows, and the supervisor puts the answers together
(`proxy/process/admin/facts_of_all.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from proxy.admin.cluster_view import ClusterView
from proxy.admin.counts import History, ProcessReport
from proxy.admin.facts import (
    ErrorLine,
    ErrorsPage,
    Overview,
    PartitionPage,
    ProcessFacts,
    ProcessState,
    RaisedAlarm,
    ReaderLine,
    ReadersPage,
    SettingsPage,
    TopicPage,
    TopicQuery,
    TopicsPage,
)
from proxy.admin.settings_facts import settings_page
from proxy.admin.tier_view import TierView
from proxy.config import TidegateConfig
from proxy.wire.error_log import Incident
from tiers.errors import RemoteLogError
from tiers.reader.read_accounts import MAX_CLIENTS, ReadAccounts
from tiers.tasks.alarms import ActiveAlarm

MAX_ALARMS = 200


class FactsUnavailableError(Exception):
    """The facts are not known now. The message is for the reader of the page."""


class FactSource(Protocol):
    """Every method raises `FactsUnavailableError`."""

    async def overview(self) -> Overview: ...

    async def topics(self, query: TopicQuery) -> TopicsPage: ...

    async def topic(self, name: str, page: int) -> TopicPage | None: ...

    async def partition(self, name: str, number: int, from_offset: int) -> PartitionPage | None: ...

    async def readers(self) -> ReadersPage: ...

    async def settings(self) -> SettingsPage: ...

    async def errors(self) -> ErrorsPage: ...


@dataclass(slots=True)
class OwnParts:
    """The parts of a process that know facts. A role sets them when it opens them."""

    tier: TierView | None = None
    cluster: ClusterView | None = None
    accounts: ReadAccounts | None = None
    report: Callable[[], ProcessReport] = field(default=lambda: ProcessReport(os.getpid()))


class OwnFacts:
    """Implements `FactSource` with what one process knows. `clock_ms` is monotonic."""

    def __init__(
        self,
        name: str,
        config: TidegateConfig,
        version: str,
        parts: OwnParts,
        state: Callable[[], ProcessState],
        not_ready: Callable[[], list[str]],
        incidents: Callable[[], Sequence[Incident]],
        environ: Sequence[str],
        *,
        clock_ms: Callable[[], int],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self.history = History()
        self._name = name
        self._config = config
        self._version = version
        self._parts = parts
        self._state = state
        self._not_ready = not_ready
        self._incidents = incidents
        self._environ = environ
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms

    def report(self) -> ProcessReport:
        return self._parts.report()

    def change(self, config: TidegateConfig) -> None:
        """Shows other settings, after a reload."""
        self._config = config

    async def sample(self) -> None:
        """Adds a sample to the history."""
        self.history.add(self._wall_clock_ms(), {self._name: self.report()})

    async def overview(self) -> Overview:
        report, reasons = self.report(), self._not_ready()
        cluster = None
        if self._parts.cluster is not None:
            try:
                look = None if self._parts.tier is None else await self._parts.tier.look()
            except RemoteLogError:
                look = None
            cluster = await self._parts.cluster.facts(look)
        process = ProcessFacts(
            name=self._name,
            pid=report.pid,
            state=self._state(),
            reasons=tuple(reasons),
            restarts=0,
            rss_bytes=report.rss_bytes,
            connections=report.connections,
        )
        return Overview(
            as_of_ms=self._wall_clock_ms(),
            version=self._version,
            is_tiered=self._config.is_tiered,
            cluster=cluster,
            stores=self.history.stores({self._name: report}),
            processes=(process,),
            alarms=(*report.alarms, *(() if cluster is None else cluster.alarms))[:MAX_ALARMS],
            history=self.history.facts(),
            events=report.events,
        )

    @property
    def _tier(self) -> TierView:
        if self._parts.tier is None:
            said = "the remote tier is not open yet" if self._config.is_tiered else "the settings tier no topics"
            raise FactsUnavailableError(said)
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
            said = "the remote tier is not open yet" if self._config.is_tiered else "the settings tier no topics"
            raise FactsUnavailableError(said)
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

    async def settings(self) -> SettingsPage:
        return settings_page(self._config, self._environ)

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
        found.append(RaisedAlarm(name, about, ": ".join(filter(None, (each[0].about, each[0].detail)))))
    return found
