"""`LogSizes` asks brokers for the sizes of the logs that they lead: one DescribeLogDirs for all logs of a broker.

A broker answers only a client that may DESCRIBE the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from kafka.protocol.admin import DescribeLogDirsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError
from tiers.lasting_trouble import LastingTrouble

_MAX_AGE_MS: Final = 2_000
_FAILURE_PAUSE_MS: Final = 60_000
"""How long a broker that does not answer is not asked again: every survey of its partitions waits for the answer."""
_ASKED_FOR_MS: Final = 300_000
"""How long a request includes a log for which nobody asks any more."""
logger = logging.getLogger(__name__)
_Log = tuple[str, int]


class _Answer(NamedTuple):
    """The sizes that a broker answered, valid until `until_ms`. Empty: it did not answer."""

    until_ms: int
    sizes: Mapping[_Log, int | None]


_NO_ANSWER: Final = _Answer(0, {})


class LogSizes:
    def __init__(self, client: BrokerClient, lane: str, clock_ms: Callable[[], int]) -> None:
        self._client = client
        self._lane = lane
        self._clock_ms = clock_ms
        self._wanted_ms: dict[int, dict[_Log, int]] = defaultdict(dict)
        self._answers: dict[int, _Answer] = {}
        self._asking: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refused = LastingTrouble(
            logger,
            "a broker does not answer how large its logs are: the owner estimates it from the number of offsets",
            "the brokers answer again how large their logs are",
            clock_ms=clock_ms,
        )

    async def ask(self, topic: str, partition: int, node_id: int, timeout_ms: int) -> int | None:
        """Returns the bytes of the log on broker `node_id`, some seconds ago at most. None: it does not answer."""
        log = topic, partition
        self._wanted_ms[node_id][log] = self._clock_ms()
        async with self._asking[node_id]:
            answer = self._answers.get(node_id, _NO_ANSWER)
            if self._clock_ms() >= answer.until_ms or (answer.sizes and log not in answer.sizes):
                answer = self._answers[node_id] = await self._ask_all(node_id, timeout_ms)
        return answer.sizes.get(log)

    async def _ask_all(self, node_id: int, timeout_ms: int) -> _Answer:
        now_ms = self._clock_ms()
        wanted = {log: at for log, at in self._wanted_ms[node_id].items() if now_ms - at < _ASKED_FOR_MS}
        self._wanted_ms[node_id] = wanted
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                sizes = dict.fromkeys(wanted) | await self._described(node_id, wanted, timeout_ms)
        except (BrokerError, TimeoutError) as error:
            self._refused.found(broker=node_id, error=str(error) or "no answer in time")
            return _Answer(self._clock_ms() + _FAILURE_PAUSE_MS, {})
        self._refused.ended()
        return _Answer(self._clock_ms() + _MAX_AGE_MS, sizes)

    async def _described(self, node_id: int, logs: Iterable[_Log], timeout_ms: int) -> dict[_Log, int]:
        """Logs that the broker does not have are left out. Raises `BrokerError`, also if the client has no right."""
        topics: dict[str, list[int]] = defaultdict(list)
        for topic, partition in logs:
            topics[topic].append(partition)
        asked = [DescribeLogDirsRequest.DescribableLogDirTopic(topic=name, partitions=topics[name]) for name in topics]
        request = DescribeLogDirsRequest(topics=asked)
        answer: Any = await self._client.request(node_id, request, timeout_ms, min_version=1, lane=self._lane)
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
