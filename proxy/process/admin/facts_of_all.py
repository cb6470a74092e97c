"""`FactsOfAll`: the facts of a proxy. The supervisor asks the process that knows, and adds its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from proxy.admin.api import PREFIX, query_of
from proxy.admin.api import adapter as adapter_of
from proxy.admin.counts import History, ProcessReport
from proxy.admin.facts import (
    THIS_PROCESS,
    ClusterFacts,
    ErrorsPage,
    EventLine,
    Overview,
    PartitionPage,
    ProcessFacts,
    ProcessState,
    RaisedAlarm,
    ReadersPage,
    SettingsPage,
    TopicPage,
    TopicQuery,
    TopicsPage,
    WaitingRead,
)
from proxy.admin.outages import sort_out, store_name
from proxy.admin.settings_facts import settings_page
from proxy.admin.source import MAX_ALARMS, FactsUnavailableError
from proxy.config import TidegateConfig
from proxy.process.admin.child_pages import FACTS_TIMEOUT_S, ChildPages
from proxy.process.admin.process_alarms import ProcessAlarms
from proxy.process.admin.process_state import STATE_LINE
from proxy.process.admin.recent_events import MAX_EVENTS, RecentEvents
from proxy.process.remote_reader import REMOTE_READER
from proxy.process.supervisor import Child, Supervisor
from proxy.version import installed_version

REPORT_PATH: Final = "/internal/report"
CLUSTER_PATH: Final = "/internal/cluster"
REMOTE_LOG: Final = "remote-log"
SUPERVISOR: Final = "supervisor"
Answer = TypeVar("Answer")


class OwnAlarms(NamedTuple):
    alarms: ProcessAlarms
    events: RecentEvents


class FactsOfAll:
    """Implements `FactSource`."""

    def __init__(
        self,
        config: TidegateConfig,
        supervisor: Supervisor,
        pages: ChildPages,
        environ: Sequence[str],
        own: OwnAlarms,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        """`own` are the alarms of the supervisor's process."""
        self.history = History()
        self._config = config
        self._supervisor = supervisor
        self._pages = pages
        self._environ = environ
        self._own = own
        self._wall_clock_ms = wall_clock_ms
        self._answered: dict[str, int | None] = {}
        """By name: the id of the process that answered."""
        self._last: dict[str, ProcessReport] = {}
        """By name: the last report."""

    def change(self, config: TidegateConfig) -> None:
        """Shows other settings, after a reload."""
        self._config = config

    async def sample(self) -> None:
        """Adds a sample of all processes to the history."""
        self.history.add(self._wall_clock_ms(), await self._reports())

    async def _reports(self) -> dict[str, ProcessReport]:
        """Returns the reports by the names of the processes. A process that is late has its last report."""
        children = self._supervisor.children
        answers = await asyncio.gather(*(self._pages.ask(child, REPORT_PATH) for child in children))
        adapter = adapter_of(ProcessReport)
        self._last |= {
            child.name: adapter.validate_json(text)
            for child, (status, text) in zip(children, answers, strict=True)
            if status == 200
        }
        pids = {child.name: child.process.pid for child in children if child.process is not None}
        return {name: report for name, report in self._last.items() if report.pid == pids.get(name)}

    async def overview(self) -> Overview:
        reports = await self._reports()
        processes = await asyncio.gather(*(self._process(child, reports) for child in self._supervisor.children))
        cluster = None
        if self._config.is_tiered:
            with suppress(FactsUnavailableError):
                cluster = await self._of(REMOTE_LOG, ClusterFacts, CLUSTER_PATH)
        of_tier = () if cluster is None else cluster.alarms
        alarms = (*self._process_alarms(reports), *map(_of_the_tier, of_tier))
        waiting = _waiting(reports)
        outages, others = sort_out(alarms, cluster, waiting, partial(store_name, self._config))
        return Overview(
            as_of_ms=self._wall_clock_ms(),
            version=installed_version(),
            is_tiered=self._config.is_tiered,
            cluster=cluster,
            stores=self.history.stores(reports),
            processes=tuple(processes),
            alarms=others[:MAX_ALARMS],
            history=self.history.facts(),
            outages=outages,
            waiting_clients=len({each.client_id for each in waiting}),
            events=self._events(reports),
        )

    def _process_alarms(self, reports: Mapping[str, ProcessReport]) -> list[RaisedAlarm]:
        """Returns the alarms about processes. One that several processes have is one alarm."""
        joined: dict[tuple[str, str, str], list[tuple[str, RaisedAlarm]]] = {}
        told = [(SUPERVISOR, each) for each in self._own.alarms.raised()]
        told += [(name, each) for name, report in reports.items() for each in report.alarms]
        for process, alarm in told:
            joined.setdefault((alarm.name, alarm.about, alarm.detail), []).append((process, alarm))
        found = []
        for (_, about, _), each in sorted(joined.items()):
            processes, alarm = [process for process, _ in each], each[0][1]
            names = ", ".join(processes) if about == THIS_PROCESS else about
            found.append(replace(alarm, about=names, process=processes[0]))
        return found

    def _events(self, reports: Mapping[str, ProcessReport]) -> tuple[EventLine, ...]:
        found = [replace(each, process=SUPERVISOR) for each in self._own.events.events()]
        found += [replace(each, process=name) for name, report in reports.items() for each in report.events]
        return tuple(sorted(found, key=lambda each: -each.time_ms)[:MAX_EVENTS])

    async def _process(self, child: Child, reports: Mapping[str, ProcessReport]) -> ProcessFacts:
        status, text = await self._pages.ask(child, "/readyz")
        state, reasons = self._state_of(child, status, text)
        report = reports.get(child.name)
        pid = None if child.process is None else child.process.pid
        return ProcessFacts(
            name=child.name,
            pid=pid,
            state=state,
            reasons=reasons,
            restarts=child.restarts,
            rss_bytes=None if report is None else report.rss_bytes,
            connections=None if report is None else report.connections,
        )

    def _state_of(self, child: Child, status: int, text: str) -> tuple[ProcessState, tuple[str, ...]]:
        """Returns the state that a child tells, and why it is not ready.

        A child that does not answer still starts. If it has answered before, it has failed."""
        reasons = () if status == 200 else tuple(text.splitlines())
        if child.process is None:
            return ProcessState.FAILED, reasons
        tells = bool(reasons) and reasons[0].startswith(STATE_LINE)
        if tells or status == 200:
            self._answered[child.name] = child.process.pid
            state = ProcessState(reasons[0].removeprefix(STATE_LINE)) if tells else ProcessState.SERVING
            return state, reasons[1:]
        has_answered = self._answered.get(child.name) == child.process.pid
        return (ProcessState.FAILED if has_answered else ProcessState.INITIALIZING), reasons

    async def topics(self, query: TopicQuery) -> TopicsPage:
        return await self._of(REMOTE_LOG, TopicsPage, f"{PREFIX}/topics", query_of(query))

    async def topic(self, name: str, page: int) -> TopicPage | None:
        return await self._known(TopicPage, f"{PREFIX}/topics/{quote(name, safe='')}", {"page": str(page)})

    async def partition(self, name: str, number: int, from_offset: int) -> PartitionPage | None:
        path = f"{PREFIX}/topics/{quote(name, safe='')}/{number}"
        return await self._known(PartitionPage, path, {"from": str(from_offset)})

    async def readers(self) -> ReadersPage:
        page, reports = await asyncio.gather(self._of(REMOTE_READER, ReadersPage, f"{PREFIX}/readers"), self._reports())
        return replace(page, waiting=tuple(_waiting(reports)))

    async def settings(self) -> SettingsPage:
        return settings_page(self._config, self._environ)

    async def errors(self) -> ErrorsPage:
        children = self._supervisor.children
        answers = await asyncio.gather(*(self._pages.ask(child, f"{PREFIX}/errors") for child in children))
        found = [
            replace(entry, process=child.name)
            for child, (status, text) in zip(children, answers, strict=True)
            if status == 200
            for entry in self._decoded(ErrorsPage, text).errors
        ]
        return ErrorsPage(tuple(sorted(found, key=lambda entry: entry.time_ms)))

    async def _of(
        self, name: str, answer: type[Answer], path: str, parameters: Mapping[str, str] | None = None
    ) -> Answer:
        """Asks the process `name`. Raises `FactsUnavailableError`."""
        status, text = await self._ask(name, path, parameters)
        if status != 200:
            raise FactsUnavailableError(_reason(text))
        return self._decoded(answer, text)

    async def _known(self, answer: type[Answer], path: str, parameters: Mapping[str, str]) -> Answer | None:
        status, text = await self._ask(REMOTE_LOG, path, parameters)
        if status == 404:
            return None
        if status != 200:
            raise FactsUnavailableError(_reason(text))
        return self._decoded(answer, text)

    async def _ask(self, name: str, path: str, parameters: Mapping[str, str] | None) -> tuple[int, str]:
        child = next((each for each in self._supervisor.children if each.name == name), None)
        if child is None:
            raise FactsUnavailableError("the settings tier no topics")
        return await self._pages.ask(child, path, parameters, FACTS_TIMEOUT_S)

    @staticmethod
    def _decoded(answer: type[Answer], text: str) -> Answer:
        adapter = adapter_of(answer)
        try:
            decoded: Answer = adapter.validate_json(text)
        except ValidationError as error:
            raise FactsUnavailableError("the process gave an answer that cannot be read") from error
        return decoded


def _waiting(reports: Mapping[str, ProcessReport]) -> list[WaitingRead]:
    found = [each for report in reports.values() for each in report.waiting]
    return sorted(found, key=lambda each: (each.since_ms, each.client_id, each.topic, each.partition))


def _of_the_tier(alarm: RaisedAlarm) -> RaisedAlarm:
    return replace(alarm, process=REMOTE_LOG, about=REMOTE_LOG if alarm.about == THIS_PROCESS else alarm.about)


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip()
