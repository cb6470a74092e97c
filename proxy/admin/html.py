"""Renders the facts as HTML, with Jinja2. Every value is escaped: topics and client ids are the users' texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from proxy.admin import words
from proxy.admin.api import STATES, query_of
from proxy.admin.drawing import Sparkline, bounds_drawing, sparkline
from proxy.admin.facts import (
    ErrorsPage,
    Overview,
    PartitionPage,
    ReadersPage,
    Series,
    SettingsPage,
    TopicPage,
    TopicSetting,
    TopicsPage,
)
from proxy.admin.runbook import runbook_link, runbook_page
from tiers.config.topic_settings import LOCAL_RETENTION_BYTES, LOCAL_RETENTION_MS
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES
from tiers.errors import short_reason

TABS: Final = (
    ("overview", "/", "Overview"),
    ("topics", "/topics", "Topics"),
    ("readers", "/readers", "Readers"),
    ("settings", "/settings", "Settings"),
    ("errors", "/errors", "Errors"),
)
_SERIES_NAMES: Final = {
    "local_p50": "p50",
    "local_p99": "p99",
    "remote_p50": "p50",
    "remote_p99": "p99",
    "local_bytes": "local tier",
    "remote_bytes": "remote tier",
    "copied_bytes": "to the remote tier",
    "backlog": "not remote yet",
    "cache_hits": "hits",
}
_COLOURS: Final = {
    "remote": "remote only",
    "both": "both tiers",
    "local": "local only",
    "unstable": "in open transactions",
    "copying": "a copy that has not ended",
    "deleting": "being deleted",
    "cut": "replaced in part by another leader's records",
    "void": "replaced by another leader's records",
    "gap": "gap: in neither tier",
}
_SOURCES: Final = {"broker": "broker's default", "topic": "topic", "file": "file", "environment": "environment"}
_RETENTION: Final = (
    (LOCAL_RETENTION_MS, "local"),
    (LOCAL_RETENTION_BYTES, "local"),
    (RETENTION_MINUTES, "total"),
    (RETENTION_BYTES, "total"),
    ("retention.ms", "total"),
    ("retention.bytes", "total"),
)


def topic_link(topic: str) -> str:
    return f"/topics/{quote(topic, safe='')}"


def runs(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as runs: `0-3, 7`."""
    found: list[list[int]] = []
    for each in numbers:
        if found and each == found[-1][1] + 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found) or words.NOTHING


def inline(text: str) -> Markup:
    """Renders a sentence with words in backquotes."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def breakable(key: str) -> Markup:
    """Returns a key that may go on in the next line after each dot."""
    return Markup(".<wbr>").join(key.split("."))


class Kept(NamedTuple):
    """A retention that applies, in words."""

    key: str
    value: str
    text: str
    source: str


def retention(settings: Iterable[TopicSetting]) -> list[Kept]:
    """Returns the retentions that limit anything. The broker's `retention.*` is the total if the topic has no other."""
    said = {each.key: each for each in settings}
    has_total = any(said[key].source != "default" for key in (RETENTION_MINUTES, RETENTION_BYTES) if key in said)
    found = []
    for key, name in _RETENTION:
        each = said.get(key)
        if each is None or each.value in ("-1", "-2"):
            continue
        of = "broker" if has_total and key.startswith("retention.") else name
        found.append(Kept(key, each.value, f"{of} {words.value_of(each)}", each.source))
    return found


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines with a common axis."""

    lines: tuple[Sparkline, ...]
    legend: tuple[str, ...]
    has_values: bool
    empty: str


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("proxy.admin"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=words.size,
        rate=words.rate,
        number=words.number,
        count=words.count,
        milliseconds=words.milliseconds,
        duration=words.duration,
        outage_title=words.outage_title,
        outage_effects=words.outage_effects,
        short=short_reason,
        breakable=breakable,
        colour=_COLOURS.__getitem__,
        in_units=words.in_units,
        age=words.age,
        moment=words.moment,
        iso=lambda at_ms: words.moment(at_ms).replace(" UTC", "Z").replace(" ", "T"),
        percent=words.percent,
        setting=words.value_of,
        source=lambda name: _SOURCES.get(name, name),
        retention=retention,
        topic_link=topic_link,
        runbook=runbook_link,
        runbook_page=runbook_page,
        inline=inline,
        runs=runs,
    )
    return environment


class Renderer:
    """Renders pages. `version` stands in their footers."""

    def __init__(self, version: str) -> None:
        self._version = version

    def _render(self, template: str, tab: str, *, is_live: bool = False, as_of_ms: int = 0, **values: Any) -> str:
        return (
            _environment()
            .get_template(template)
            .render(tabs=TABS, tab=tab, version=self._version, is_live=is_live, as_of_ms=as_of_ms, **values)
        )

    def topics(self, facts: TopicsPage) -> str:
        def link(**changes: object) -> str:
            asked = {**query_of(facts.query), "page": "1"} | {
                name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in changes.items()
            }
            shown = {name: value for name, value in asked.items() if value not in ("", "false", "name", "1")}
            return f"/topics?{urlencode(shown)}" if shown else "/topics"

        return self._render(
            "topics.html",
            "topics",
            is_live=True,
            as_of_ms=facts.as_of_ms,
            facts=facts,
            states=STATES,
            list_link=link,
            page_link=lambda page: link(page=page),
        )

    def topic(self, facts: TopicPage) -> str:
        def link(page: int) -> str:
            return f"{topic_link(facts.topic.topic)}?page={page}"

        return self._render(
            "topic.html", "topics", is_live=True, as_of_ms=facts.as_of_ms, facts=facts, page_link=link
        )  # fmt: skip

    def partition(self, name: str, facts: PartitionPage) -> str:
        return self._render(
            "partition.html",
            "topics",
            is_live=True,
            as_of_ms=facts.as_of_ms,
            facts=facts,
            name=name,
            drawing=bounds_drawing(facts),
        )

    def overview(self, facts: Overview) -> str:
        series = {each.name: each for each in facts.history.series}
        return self._render(
            "overview.html",
            "overview",
            is_live=True,
            as_of_ms=facts.as_of_ms,
            facts=facts,
            charts=partial(_chart, series),
            latest=partial(_latest, series),
            shown_time=_shown_time(facts),
            both_rates=_sum_of_latest(series, ("local_bytes", "remote_bytes")),
        )

    def readers(self, facts: ReadersPage) -> str:
        return self._render("readers.html", "readers", is_live=True, as_of_ms=facts.as_of_ms, facts=facts)

    def settings(self, facts: SettingsPage) -> str:
        return self._render("settings.html", "settings", facts=facts)

    def errors(self, facts: ErrorsPage) -> str:
        return self._render("errors.html", "errors", is_live=True, facts=facts)

    def runbook(self, name: str) -> str | None:
        """Returns None for a page that does not exist."""
        page = runbook_page(name)
        return None if page is None else self._render("runbook.html", "overview", page=page)

    def message(self, heading: str, text: str, tab: str = "") -> str:
        return self._render("message.html", tab, is_live=True, heading=heading, text=text)


def _shown_time(facts: Overview) -> str:
    shown_ms = len(facts.history.times_ms) * facts.history.interval_ms
    return "The last hour" if shown_ms >= 3_600_000 else f"The last {words.duration(max(shown_ms, 60_000))}"


def _chart(series: dict[str, Series], names: Sequence[str]) -> Chart:
    shown = [series[name] for name in names if name in series]
    known = [value for each in shown for value in each.values if value is not None]
    if not known:
        has_samples = any(each.values for each in shown)
        empty = "nothing in this time" if has_samples else "the first values come in half a minute"
        return Chart((), (), has_values=False, empty=empty)
    ceiling = 100.0 if shown[0].unit == "%" else max(known)
    lines = tuple(sparkline(each, ceiling) for each in shown)
    legend = tuple(
        f"{_SERIES_NAMES[each.name]}, up to {words.in_unit(each, line.highest)}"
        for each, line in zip(shown, lines, strict=True)
    )
    return Chart(lines, legend, has_values=True, empty="")


def _latest(series: dict[str, Series], name: str) -> str:
    known = series.get(name)
    return words.NOTHING if known is None or not known.values else words.in_unit(known, known.values[-1])


def _sum_of_latest(series: dict[str, Series], names: Sequence[str]) -> str:
    known = [series[name].values[-1] for name in names if name in series and series[name].values]
    return words.rate(sum(value or 0 for value in known)) if known else words.NOTHING
