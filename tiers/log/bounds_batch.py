"""`BoundsBatch`: where the logs of a leader's partitions begin and end, in one Fetch that brings no record.

A fetch far beyond the end, by a client that claims to have read the leader's newest epoch, has diverged: Kafka answers
with the bounds, the log's end beside them and no record (semantics 6.3; verified on 4.3, for logs that are empty or
trimmed to their end as well). A partition whose log keeps no leader epochs, as those of old message formats on brokers
below 4.0, is answered OFFSET_OUT_OF_RANGE.
"""

from __future__ import annotations

import asyncio

from tiers.broker.client import BrokerClient, Leader
from tiers.broker.fetch import FetchedPartition, FetchPosition, fetch_raw
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

_BEYOND_ALL = 2**62
_Question = tuple[TopicIdPartition, int]
_Questions = dict[_Question, asyncio.Future[FetchedPartition]]


class BoundsBatch:
    """What is asked of one leader at once goes in one request. Whoever asked first sends it."""

    def __init__(self, client: BrokerClient, lane: str) -> None:
        self._client = client
        self._lane = lane
        self._open: dict[int, _Questions] = {}

    async def ask(self, partition: TopicIdPartition, leader: Leader, timeout_ms: int) -> FetchedPartition:
        """The leader's answer to a request that left after this call. Raises `BrokerError`."""
        question = (partition, leader.leader_epoch)
        questions = self._open.get(leader.node_id)
        if questions is not None:
            answer = questions.setdefault(question, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    return await asyncio.shield(answer)
            except TimeoutError as error:
                raise BrokerError(f"the bounds of {partition} were not answered in time", retriable=True) from error
        answer = asyncio.get_running_loop().create_future()
        questions = self._open[leader.node_id] = {question: answer}
        try:
            try:
                await asyncio.sleep(0)
            finally:
                del self._open[leader.node_id]
            await self._send(leader.node_id, questions, timeout_ms)
        finally:
            _end(questions)
        return answer.result()

    async def _send(self, node_id: int, questions: _Questions, timeout_ms: int) -> None:
        positions = [
            FetchPosition(one.topic_id, one.partition, _BEYOND_ALL, epoch, max_bytes=1, last_fetched_epoch=epoch)
            for one, epoch in questions
        ]
        fetched = await fetch_raw(self._client, node_id, positions, max_bytes=1, timeout_ms=timeout_ms, lane=self._lane)
        answers = {(one.topic_id, one.partition): one for one in fetched}
        for (partition, _), answer in questions.items():
            found = answers.get((partition.topic_id, partition.partition))
            if found is not None:
                answer.set_result(found)


def _end(questions: _Questions) -> None:
    """Whoever was left without an answer asks again: the broker throttles, or who asked for all has gone."""
    for (partition, _), answer in questions.items():
        if not answer.done():
            answer.set_exception(BrokerError(f"{partition}: the broker gave no answer", retriable=True))
            answer.exception()
