"""`LogSizes` asks brokers for the sizes of their logs: one DescribeLogDirs for all logs of a broker.

A broker answers only a client that may DESCRIBE the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kafka.protocol.admin import DescribeLogDirsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError
from tiers.lasting_trouble import LastingTrouble

_VALID_MS: Final = 5_000
_LONGEST_VALID_MS: Final = 60_000
_VALID_TIMES_WAITED: Final = 20
"""An answer is valid for so many times the time that it took, since the surveys of the broker's logs wait for it."""
_LANE: Final = "log-sizes"
"""A broker with a slow disk answers late. No other request waits for that answer."""
logger = logging.getLogger(__name__)
_Log = tuple[str, int]


class _Answer(NamedTuple):
    """The sizes that a broker answered, valid until `until_ms`. Empty: it did not answer."""

    until_ms: int
    sizes: Mapping[_Log, int]


_NO_ANSWER: Final = _Answer(-1, {})


class LogSizes:
    def __init__(self, client: BrokerClient, clock_ms: Callable[[], int]) -> None:
        self._client = client
        self._clock_ms = clock_ms
        self._answers: dict[int, _Answer] = {}
        self._asking: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refused: dict[int, LastingTrouble] = defaultdict(
            lambda: LastingTrouble(
                logger,
                "a broker does not answer how large its logs are: the owner estimates it from the number of offsets",
                "the broker answers again how large its logs are",
                clock_ms=clock_ms,
            )
        )

    async def ask(self, topic: str, partition: int, node_id: int, timeout_ms: int) -> int | None:
        """Returns the bytes of the log on broker `node_id`, a minute ago at most. None: it does not answer."""
        async with self._asking[node_id]:
            answer = self._answers.get(node_id, _NO_ANSWER)
            if self._clock_ms() >= answer.until_ms:
                answer = self._answers[node_id] = await self._ask_all(node_id, timeout_ms)
        return answer.sizes.get((topic, partition))

    async def _ask_all(self, node_id: int, timeout_ms: int) -> _Answer:
        began_ms, sizes, least_ms = self._clock_ms(), dict[_Log, int](), _VALID_MS
        try:
            sizes = await self._described(node_id, timeout_ms)
            self._refused[node_id].ended()
        except BrokerError as error:
            self._refused[node_id].found(broker=node_id, error=str(error))
            least_ms = _VALID_MS if error.retriable else _LONGEST_VALID_MS
        valid_ms = max(least_ms, _VALID_TIMES_WAITED * (self._clock_ms() - began_ms))
        return _Answer(self._clock_ms() + min(valid_ms, _LONGEST_VALID_MS), sizes)

    async def _described(self, node_id: int, timeout_ms: int) -> dict[_Log, int]:
        """Raises `BrokerError`, also if the client has no right."""
        request = DescribeLogDirsRequest(topics=None)
        answer: Any = await self._client.request(node_id, request, timeout_ms, min_version=1, lane=_LANE)
        if answer.error_code or not answer.results:
            # Before version 3, a broker refuses with an answer that has nothing.
            code = answer.error_code or ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            raise BrokerError(f"broker {node_id} answered DescribeLogDirs with error {code}", code)
        folders = (folder.topics for folder in answer.results if folder.error_code == ErrorCode.NONE)
        return {
            (topic.name, one.partition_index): one.partition_size
            for topics in folders
            for topic in topics
            for one in topic.partitions
            if not one.is_future_key
        }
