"""`BoundsBatch` reads the start and end of many logs on one leader, in one Fetch that returns no records.

The Fetch asks for an offset far beyond the end and claims that the client has read the leader's newest epoch. For Kafka
this is a divergence: it answers with the log's bounds and without records (docs/semantics.md 6.3). This was verified on
Kafka 4.3, also for logs that are empty or trimmed to their end. If a log keeps no leader epochs, the leader answers
OFFSET_OUT_OF_RANGE instead. This happens for old message formats on brokers below 4.0.
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
    """Batches concurrent questions to the same leader into one request. The caller that asks first sends it."""

    def __init__(self, client: BrokerClient, lane: str) -> None:
        self._client = client
        self._lane = lane
        self._open: dict[int, _Questions] = {}

    async def ask(self, partition: TopicIdPartition, leader: Leader, timeout_ms: int) -> FetchedPartition:
        """Returns the leader's answer to a request that is sent after this call. Raises `BrokerError`."""
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
        # A broker answers the last entry for a partition. The same partition in an older leader epoch gets no answer.
        last = {partition: answer for (partition, _), answer in questions.items()}
        for partition, answer in last.items():
            found = answers.get((partition.topic_id, partition.partition))
            if found is not None:
                answer.set_result(found)


def _end(questions: _Questions) -> None:
    """Fails the unanswered questions with a retriable error.

    The broker throttles, or the caller that sent the request failed or was cancelled.
    """
    for (partition, _), answer in questions.items():
        if not answer.done():
            answer.set_exception(BrokerError(f"{partition}: the broker gave no answer", retriable=True))
            answer.exception()
