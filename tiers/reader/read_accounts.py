"""`ReadAccounts`: who reads the remote tier: the reads and bytes of each client id from each topic.

Clients choose their ids, so the number of accounts is bounded. When all places are taken, a new client takes the place
of the one that has been idle the longest, if that is idle for `IDLE_MS`. Otherwise its reads are those of `OTHERS`. So
are the counts of a client that lost its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tiers.metric_spec import CounterSpec

OTHERS: Final = "(others)"
FIRST_READ: Final = "with the client's first read"
MAX_CLIENTS: Final = 100
MAX_TOPICS: Final = 50
"""The topics of one client that have an account of their own."""
MAX_ID_CHARS: Final = 200
"""Longer client ids are cut: an id may have 32767 bytes, and stands in every series of its client."""
IDLE_MS: Final = 900_000
RATE_MS: Final = 60_000
_BUCKET_MS: Final = 5_000


@dataclass(slots=True)
class ReadAccount:
    """The reads of one client id from one topic. `throttled` reads were answered empty by a quota."""

    client_id: str
    topic: str
    size_bytes: int = 0
    reads: int = 0
    throttled: int = 0
    cache_hits: int = 0
    last_ms: int = 0
    """By the monotonic clock."""
    _recent: deque[tuple[int, int]] = field(default_factory=deque)
    """The bytes of the last minute, by the times at which their buckets begin."""

    def note(self, now_ms: int, size_bytes: int) -> None:
        self.last_ms = now_ms
        self.size_bytes += size_bytes
        begin_ms = now_ms - now_ms % _BUCKET_MS
        if self._recent and self._recent[-1][0] == begin_ms:
            self._recent[-1] = begin_ms, self._recent[-1][1] + size_bytes
        else:
            self._recent.append((begin_ms, size_bytes))
        self._forget(now_ms)

    def bytes_per_second(self, now_ms: int) -> float:
        """Returns the rate over the last minute."""
        self._forget(now_ms)
        return sum(size for _, size in self._recent) * 1000 / RATE_MS

    def add(self, other: ReadAccount) -> None:
        """Adds the counts of an account that is given up. Its rate is 0 by then."""
        self.size_bytes += other.size_bytes
        self.reads += other.reads
        self.throttled += other.throttled
        self.cache_hits += other.cache_hits
        self.last_ms = max(self.last_ms, other.last_ms)

    def _forget(self, now_ms: int) -> None:
        while self._recent and self._recent[0][0] <= now_ms - RATE_MS:
            self._recent.popleft()


READ_BYTES = CounterSpec(
    "tidegate_remote_client_read_bytes",
    f"Bytes that the clients with an id read from the remote tier. After {MAX_CLIENTS} ids, the rest is {OTHERS}.",
    ("client_id", "topic"),
    since=FIRST_READ,
)
THROTTLED = CounterSpec(
    "tidegate_remote_client_reads_throttled",
    "Reads of the clients with an id that a quota answered empty.",
    ("client_id", "topic"),
    since=FIRST_READ,
)


class ReadAccounts(Collector):
    """The accounts of one process, and their metrics. `clock_ms` is monotonic."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._clients: dict[str, dict[str, ReadAccount]] = {}
        """By client id. The client that has been idle the longest is the first."""
        self._others: dict[str, ReadAccount] = {}

    def note_read(self, client_id: str, topic: str, size_bytes: int, *, is_cache_hit: bool) -> None:
        account = self._account(client_id, topic)
        account.reads += 1
        account.cache_hits += is_cache_hit
        account.note(self._clock_ms(), size_bytes)

    def note_throttled(self, client_id: str, topic: str) -> None:
        account = self._account(client_id, topic)
        account.throttled += 1
        account.note(self._clock_ms(), 0)

    def accounts(self) -> list[ReadAccount]:
        return [account for topics in (*self._clients.values(), self._others) for account in topics.values()]

    @property
    def total_bytes(self) -> int:
        return sum(account.size_bytes for account in self.accounts())

    def collect(self) -> Iterator[Metric]:
        read, throttled = READ_BYTES.family(), THROTTLED.family()
        for account in self.accounts():
            names = (account.client_id, account.topic)
            read.add_metric(names, account.size_bytes)
            throttled.add_metric(names, account.throttled)
        yield from (read, throttled)

    def _account(self, client_id: str, topic: str) -> ReadAccount:
        client_id = client_id[:MAX_ID_CHARS]
        topics = self._clients.pop(client_id, None)
        if topics is None and client_id != OTHERS and self._has_room():
            topics = {}
        if topics is None:
            topics = self._others
        else:
            self._clients[client_id] = topics
        name = OTHERS if topics is self._others else client_id
        if topic not in topics and len(topics) >= MAX_TOPICS:
            topic = OTHERS
        return topics.setdefault(topic, ReadAccount(name, topic))

    def _has_room(self) -> bool:
        """Whether there is a place for one more client. Gives up the client that has been idle the longest."""
        if len(self._clients) < MAX_CLIENTS:
            return True
        oldest, topics = next(iter(self._clients.items()))
        if self._clock_ms() - max(each.last_ms for each in topics.values()) < IDLE_MS:
            return False
        for account in self._clients.pop(oldest).values():
            self._account(OTHERS, account.topic).add(account)
        return True
