"""`TierView` answers questions about the tier, in the process that keeps the metadata and runs the RLM tasks.

A task of the view looks at the tier while clients of the page ask, and rests otherwise. A caller gets the last
look, and waits for a new one only if that is old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import Final, Self

from proxy.admin.facts import (
    GapFacts,
    PartitionLine,
    PartitionPage,
    SegmentSpan,
    TopicLine,
    TopicPage,
    TopicQuery,
    TopicSetting,
    TopicsPage,
    WhyFacts,
)
from proxy.admin.lines import Spans, segment_facts, topic_settings
from proxy.admin.tier_look import Look, Looker, TierParts
from proxy.admin.topic_list import TOPICS_PER_PAGE, matching, page_count, page_of, summed
from proxy.admin.whys import whys_of
from proxy.cluster.broker_configs import BrokerValue
from tiers.errors import RemoteLogError
from tiers.lasting_trouble import LastingTrouble
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds

logger = logging.getLogger(__name__)

FRESH_MS: Final = 10_000
"""A look younger than this answers without a new one."""
WAIT_MS: Final = 3_000
"""How long a caller waits for a new look before it gets the last one."""
_REST: Final = 10
"""A look rests this many times as long as it took, so that it takes no more than a tenth of the loop's time."""
_LONGEST_REST_S: Final = 30.0
_CONFIG_TIMEOUT_MS: Final = 1_500
_CONFIGS_KEPT_MS: Final = 30_000
_MAX_EXPLAINED: Final = 1_000
"""The segments of a partition that is explained: an explanation takes microseconds for each of them."""
_SEGMENTS_PER_SLICE: Final = 1_000
PARTITIONS_PER_PAGE: Final = 200
SEGMENTS_PER_PAGE: Final = 100


class TierView:
    """An async context manager, which runs the task that looks. `clock_ms` is monotonic."""

    def __init__(self, parts: TierParts, *, clock_ms: Callable[[], int], wall_clock_ms: Callable[[], int]) -> None:
        self._parts = parts
        self._looker = Looker(parts, clock_ms, wall_clock_ms)
        self._clock_ms = clock_ms
        self._look: Look | None = None
        self._asked = asyncio.Event()
        self._looked = asyncio.Condition()
        self._configs: dict[str, tuple[int, Mapping[str, BrokerValue]]] = {}
        self._failing = LastingTrouble(
            logger, "the tier cannot be looked at", "the tier can be looked at again", clock_ms=clock_ms
        )
        self._tasks = asyncio.TaskGroup()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep(), name="tier-view")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _keep(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            began_ms = self._clock_ms()
            try:
                self._look = await self._looker.look()
                self._failing.ended()
            except RemoteLogError as error:
                self._failing.found(error=str(error))
            except Exception:  # the page must not end the process that copies
                logger.exception("the tier could not be looked at")
            async with self._looked:
                self._looked.notify_all()
            await asyncio.sleep(min(_LONGEST_REST_S, max(1.0, _REST * (self._clock_ms() - began_ms) / 1000)))

    async def look(self) -> Look:
        """Returns the last look, or a new one if the last one is not fresh and the new one is ready in time.

        Raises `RemoteLogError` if there is none."""
        known = self._look
        if known is None or self._clock_ms() - known.began_ms >= FRESH_MS:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_MS / 1000), self._looked:
                    self._asked.set()
                    await self._looked.wait()
        if self._look is None:
            raise RemoteLogError("the remote tier has not been looked at yet: try again in a moment")
        return self._look

    async def topics(self, query: TopicQuery) -> TopicsPage:
        """Returns one page of the topics. Raises `RemoteLogError`."""
        look = await self.look()
        found = matching(look.topics.values(), query)
        page = await self._with_settings(look, page_of(found, query.page, TOPICS_PER_PAGE))
        pages = page_count(len(found), TOPICS_PER_PAGE)
        return TopicsPage(
            as_of_ms=look.as_of_ms,
            query=replace(query, page=min(max(1, query.page), pages)),
            total=len(look.topics),
            matching=len(found),
            partitions=sum(each.partitions for each in look.topics.values()),
            pages=pages,
            bytes=summed(look.topics.values()),
            topics=tuple(page),
        )

    async def topic(self, name: str, page: int) -> TopicPage | None:
        """Returns a topic; None if the tier does not know it. Raises `RemoteLogError`."""
        look = await self.look()
        if name not in look.topics:
            return None
        lines = look.partitions.get(name, ())
        pages = page_count(len(lines), PARTITIONS_PER_PAGE)
        (topic,) = await self._with_settings(look, [look.topics[name]])
        shown = page_of(lines, page, PARTITIONS_PER_PAGE)
        return TopicPage(look.as_of_ms, topic, min(max(1, page), pages), pages, tuple(shown))

    async def partition(self, name: str, number: int, from_offset: int) -> PartitionPage | None:
        """Returns a partition with its segments from `from_offset` on; None if the tier does not know it.

        Raises `RemoteLogError`."""
        look, metadata = await self.look(), self._parts.metadata
        line = next((each for each in look.partitions.get(name, ()) if each.partition == number), None)
        if line is None:
            return None
        partition = TopicIdPartition(look.ids[name], number, line.topic)
        (topic,) = await self._with_settings(look, [look.topics[name]])
        window = list(islice(metadata.stored_segments(partition, from_offset), SEGMENTS_PER_PAGE + 1))
        following = window[SEGMENTS_PER_PAGE].start_offset if len(window) > SEGMENTS_PER_PAGE else None
        report = self._parts.report(partition)
        notes, whys = await self._explained(partition, line)
        return PartitionPage(
            as_of_ms=look.as_of_ms,
            line=line,
            state=topic.state,
            from_offset=from_offset,
            next_from_offset=following,
            segments=tuple(segment_facts(each, line.local_start) for each in window[:SEGMENTS_PER_PAGE]),
            shape=await self._shape(partition, line.segments + line.cut_segments),
            gaps=tuple(GapFacts(*gap) for gap in metadata.gaps(partition)),
            stages=() if report is None else report.stages,
            settings=topic.settings,
            notes=notes,
            whys=whys,
        )

    async def _explained(
        self, partition: TopicIdPartition, line: PartitionLine
    ) -> tuple[tuple[str, ...], tuple[WhyFacts, ...]]:
        """Returns the notes and the answers to the questions that begin with "why"."""
        if line.segments > _MAX_EXPLAINED:
            return ("The log has too many segments to explain here: use `tidegate explain`.",), ()
        bounds = None
        if line.local_start is not None and line.last_stable_offset is not None and line.high_watermark is not None:
            epoch = -1 if line.leader_epoch is None else line.leader_epoch
            bounds = LocalLogBounds(line.local_start, line.last_stable_offset, line.high_watermark, epoch)
        answer = await self._parts.explained(partition, bounds, line.trouble or "")
        return answer.notes, whys_of(answer)

    async def _shape(self, partition: TopicIdPartition, total: int) -> tuple[SegmentSpan, ...]:
        spans = Spans(total)
        for number, segment in enumerate(self._parts.metadata.stored_segments(partition), 1):
            spans.add(segment)
            if not number % _SEGMENTS_PER_SLICE:
                await asyncio.sleep(0)
        return spans.result()

    async def _with_settings(self, look: Look, topics: Iterable[TopicLine]) -> list[TopicLine]:
        """Adds their settings to topics. What the brokers say about `retention.*` is as old as `_CONFIGS_KEPT_MS`."""
        listed = list(topics)
        there = [each.topic for each in listed if each.state not in ("deleted", "missing")]
        await self._read_configs(there)
        return [replace(each, settings=tuple(self._settings(look, each))) for each in listed]

    async def _read_configs(self, names: Collection[str]) -> None:
        now_ms = self._clock_ms()
        self._configs = {name: each for name, each in self._configs.items() if now_ms - each[0] < _CONFIGS_KEPT_MS}
        unread = [name for name in names if name not in self._configs]
        if not unread:
            return
        with suppress(RemoteLogError):  # the page shows the settings that it knows
            found = await self._parts.configs(unread, _CONFIG_TIMEOUT_MS)
            self._configs |= {name: (now_ms, found.get(name, {})) for name in unread}

    def _settings(self, look: Look, topic: TopicLine) -> Iterable[TopicSetting]:
        topic_id = look.ids.get(topic.topic)
        own = {} if topic_id is None else self._parts.metadata.topic_tier_config(topic_id)
        return topic_settings(topic.topic, self._parts.rules(), own, self._configs.get(topic.topic, (0, {}))[1])
