"""Judges all partitions of one response that the broker answered OFFSET_OUT_OF_RANGE.

A partition whose facts are all known is judged at once. The other partitions are judged concurrently, with a deadline.
If a judgement takes longer, its partition is unavailable in this response, and the judgement continues for the next
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from protocol.apis.fetch.request import FetchPartition
from protocol.apis.fetch.response import FetchResponse, FetchResponsePartition, out_of_range
from proxy.handlers.base import HandlerTools
from proxy.handlers.fetch.connection_states import PartitionKey
from proxy.handlers.fetch.held import HeldFetch, answer_by_ms
from proxy.handlers.fetch.local import LocalAnswers
from proxy.handlers.fetch.verdict import FetchJudge, Judgement, Verdict
from tiers.errors import RemoteLogError

logger = logging.getLogger(__name__)

_JUDGE_MAX_MS = 5_000
"""The longest time that a judgement runs, whatever deadline the client chose. No response may be waiting for it."""


class FetchJudging:
    def __init__(self, tools: HandlerTools, judge: FetchJudge, local: LocalAnswers) -> None:
        self._tools = tools
        self._judge = judge
        self._local = local

    async def judge(self, held: HeldFetch, response: FetchResponse) -> dict[int, Judgement]:
        """Returns the judgements of all out-of-range partitions, by index in the response."""
        # If the request names a partition twice, the broker answers its last entry.
        asked = {(entry.topic, entry.partition): entry for entry in held.request.partitions}
        indexes = out_of_range(response)
        deadline_ms = answer_by_ms(held, response, self._tools.clock_ms())
        judgements = {index: self._judge_at_once(held, response.partitions[index], asked) for index in indexes}
        doubtful = [index for index, judgement in judgements.items() if judgement is None]
        found = await asyncio.gather(
            *(self._judge_one(held, response.partitions[index], asked, deadline_ms) for index in doubtful)
        )
        found_at = dict(zip(doubtful, found, strict=True))
        return {index: judgement or found_at[index] for index, judgement in judgements.items()}

    def _judge_at_once(
        self, held: HeldFetch, entry: FetchResponsePartition, asked: Mapping[PartitionKey, FetchPartition]
    ) -> Judgement | None:
        key = (entry.topic, entry.partition)
        running = held.reads.get(key)
        if running is not None and not running.has_budget:
            # This read may return no bytes, so its judgement does not matter. A request for thousands of partitions
            # therefore judges only a few.
            return Judgement(Verdict.REMOTE, running.request.partition, is_tiered=True, position=running.request.offset)
        return self._judge.judge_at_once(
            entry.topic, entry.partition, asked.get(key), received_at_ms=held.exchange.request.received_at_ms
        )

    async def _judge_one(
        self,
        held: HeldFetch,
        entry: FetchResponsePartition,
        asked: Mapping[PartitionKey, FetchPartition],
        deadline_ms: int,
    ) -> Judgement:
        found: asyncio.Future[Judgement] = asyncio.get_running_loop().create_future()
        self._tools.spawn(self._judge_into(found, held, entry, asked.get((entry.topic, entry.partition))))
        try:
            async with asyncio.timeout(max(1, deadline_ms - self._tools.clock_ms()) / 1000):
                return await found
        except TimeoutError:
            return self._unavailable(entry)

    async def _judge_into(
        self,
        found: asyncio.Future[Judgement],
        held: HeldFetch,
        entry: FetchResponsePartition,
        asked: FetchPartition | None,
    ) -> None:
        """Judges one partition, and sets the result of `found`. Continues when the response could not wait longer.

        The facts that it learns are then known for the next request. Otherwise that request would start again, and
        would reach its deadline again."""
        deadline_ms = min(held.deadline_ms, self._tools.clock_ms() + _JUDGE_MAX_MS)
        try:
            async with asyncio.timeout(max(1, deadline_ms - self._tools.clock_ms()) / 1000):
                judgement = await self._judge.judge(
                    entry.topic,
                    entry.partition,
                    asked,
                    received_at_ms=held.exchange.request.received_at_ms,
                    deadline_ms=deadline_ms,
                    connection_id=held.exchange.connection_id,
                )
        except (TimeoutError, RemoteLogError):
            judgement = self._unavailable(entry)
        except Exception:  # a defect may fail this partition, but must not end the server's task group
            logger.exception("a partition cannot be judged: it is unavailable", extra={"partition": entry.partition})
            judgement = self._unavailable(entry)
        if not found.done():
            found.set_result(judgement)

    def _unavailable(self, entry: FetchResponsePartition) -> Judgement:
        known = self._judge.known_partition(entry.topic, entry.partition)
        return Judgement(Verdict.UNAVAILABLE, known, is_tiered=self._local.is_tiered(entry.topic))
