"""Tools for tests of losses: a topic with both tiers, a watch for deleted data, and functions that cut a log."""

from __future__ import annotations

import asyncio
import json
import struct
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from protocol.errors import ErrorCode
from protocol.records.record_batch import RecordBatch, iterate_batches
from protocol.records.record_reader import read_records
from tests.support.rigs import tier_command
from tests.support.rigs.strict_consumer import RECORD, consumer_at, local_log_start, read
from tests.support.rigs.tier_command import Answer
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.running_brokers import running_brokers
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tiers.metadata.records.serde import SEGMENT_METADATA_UPDATE_API_KEY

EARLIEST = -2
SEGMENT_BYTES = 100_000
ASK_AGAIN = {
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.REPLICA_NOT_AVAILABLE,
    ErrorCode.OFFSET_NOT_AVAILABLE,
}
"""The errors that every client retries silently."""


class Site:
    """A topic with both tiers, and the operator's commands. Every start is a new process with the same state."""

    def __init__(self, cluster: KafkaCluster, home: Path, topic: str) -> None:
        self.tier_folder = home / "tier"
        self.cluster, self.home, self.topic = cluster, home, topic
        self.metadata_topic = f"__metadata-{topic}"[:200]
        self._tiered = [topic]
        self._more = ""

    @property
    def state(self) -> Path:
        return self.home / "state"

    def proxy(self) -> TidegateProcess:
        """Returns a proxy that is not started yet."""
        self.tier_folder.mkdir(parents=True, exist_ok=True)
        return tidegate_over(
            self.cluster,
            self.home,
            storage={"implementation": "local", "path": str(self.tier_folder)},
            tiered=self._tiered,
            segment_bytes=SEGMENT_BYTES,
            settings={
                "remote.log.metadata.topic.name": self.metadata_topic,
                "remote.log.metadata.topic.num.partitions": 1,
                "remote.log.visible.after.ms": 1000,
                "remote.fetch.max.wait.ms": 500,
            },
            more=self._more,
        )

    @contextmanager
    def alarmed_proxy(self) -> Iterator[TidegateProcess]:
        """Starts a proxy that may stay unready."""
        proxy = self.proxy()
        proxy.wait_until_ready = lambda timeout_s=TIMEOUT_S: until(lambda: answers(proxy), timeout_s)  # type: ignore[method-assign]
        with proxy:
            yield proxy

    def tier(self, *arguments: str) -> Answer:
        """Runs `tidegate tier ...`, with or without a running proxy."""
        self.home.mkdir(exist_ok=True)
        config = self.home / "operator.toml"
        proxy = self.proxy()
        config.write_text(proxy.config.read_text())
        proxy.stop()
        return asyncio.run(tier_command.run(config, *arguments))

    def bounds(self, topic: str | None = None) -> dict[str, Any]:
        """Returns the bounds of partition 0."""
        _, out, err = self.tier("bounds", "--json", topic or self.topic)
        assert out, err
        (found,) = json.loads(out)
        return dict(found)

    def is_remote_up_to(self, end_offset: int, topic: str | None = None) -> bool:
        return bool(self.bounds(topic)["remote_end"] == end_offset)

    def objects(self) -> set[Path]:
        """Returns the objects of segments in the store."""
        return {path for path in self.tier_folder.rglob("*") if path.suffix in (".log", ".indexes")}

    def local_log_start(self) -> int:
        """Returns the broker's log start."""
        return local_log_start(self.cluster, self.topic)

    def fetch_error(self, address: tuple[str, int], offset: int) -> int:
        """Returns the error of a Fetch at `offset`."""
        topic_id = topic_id_of(self.cluster.bootstrap_servers, self.topic)
        with Peer(address) as peer:
            (found,) = peer.fetch(17, self.topic, topic_id, offset, max_bytes=1).partitions
        return found.error_code

    def earliest(self, address: tuple[str, int], topic: str | None = None) -> int | None:
        """Returns the earliest offset of ListOffsets. None: the client must retry."""
        with Peer(address) as peer:
            ((_, error_code, _, offset, _),) = peer.list_offsets(9, topic or self.topic, [(0, EARLIEST)])
        assert error_code in {ErrorCode.NONE, *ASK_AGAIN}
        return None if error_code else offset

    def until_earliest(self, address: tuple[str, int], topic: str | None = None) -> int:
        """Returns the earliest offset. Retries until there is an answer."""
        found: list[int] = []

        def is_answered() -> bool:
            offset = self.earliest(address, topic)
            found.extend([] if offset is None else [offset])
            return bool(found)

        until(is_answered)
        return found[0]


class Watch:
    """Checks that the store keeps its objects, that the log start stays, and that no readable offset is refused."""

    def __init__(
        self,
        site: Site,
        proxy: TidegateProcess,
        readable: Collection[int],
        covered: Collection[str] = (),
    ) -> None:
        """`readable` are the offsets that each look requests.

        `covered` are segments whose records other segments have, so that the owner may delete their objects."""
        self._site = site
        self._proxy = proxy
        self._readable = readable
        self._objects = {path for path in site.objects() if not any(each in path.name for each in covered)}

    def check(self) -> None:
        lost = self._objects - self._site.objects()
        names = sorted(path.name for path in lost)
        assert not lost, f"{names} of {len(self._objects)} objects were deleted from the store"
        leader = leader_behind(self._proxy)
        earliest = self._site.earliest(leader)
        assert earliest in (None, 0), f"the log start is {earliest}, and was 0 before"
        errors = {offset: self._site.fetch_error(leader, offset) for offset in self._readable}
        refused = {offset: error for offset, error in errors.items() if error not in {ErrorCode.NONE, *ASK_AGAIN}}
        assert not refused, f"errors by offset: {refused}"

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition. Checks before each try, and once more when the condition holds."""

        def holds() -> bool:
            self.check()
            return condition()

        until(holds)
        self.check()


def leader_behind(proxy: TidegateProcess, node_id: int = 1) -> tuple[str, int]:
    """Returns the address of a broker for clients of the proxy."""
    return running_brokers(*proxy.address, timeout_s=TIMEOUT_S)[node_id]


def records_from(bootstrap: str, topic: str, offset: int, count: int) -> list[RECORD]:
    """Reads records with a consumer that fails instead of resetting its position."""
    with consumer_at(bootstrap, topic, offset) as consumer:
        return read(consumer, count)


def alarms(proxy: TidegateProcess, topic: str, *reasons: str) -> float:
    """Returns the number of alarms for these reasons. Default: for all reasons."""
    name = "tidegate_remote_log_alarms_total"
    return sum(proxy.metric(name, topic=topic, **({"reason": one} if one else {})) for one in reasons or ("",))


def not_ready(proxy: TidegateProcess) -> str:
    """Returns the text of `/readyz`. Empty while the proxy is ready, or does not answer yet."""
    try:
        with urllib.request.urlopen(f"http://{proxy.admin[0]}:{proxy.admin[1]}/readyz", timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def answers(proxy: TidegateProcess) -> bool:
    """Whether the admin port and the clients' port answer, with any answer."""
    try:
        proxy.metrics()
        return bool(running_brokers(*proxy.address, timeout_s=TIMEOUT_S))
    except (OSError, struct.error):
        return False


def lines_about(proxy: TidegateProcess, *words: str) -> list[str]:
    """Returns the logged lines that have all these words."""
    return [line for line in proxy.output.read_text().splitlines() if all(word in line for word in words)]


def cut_log(folder: Path) -> None:
    """Removes the last third of the metadata's log, as a power failure does before a flush to disk.

    The broker must be stopped. The remaining log ends with the end of a copy and its transaction, so nothing stays
    open."""
    log, *others = folder.glob("*.log")
    assert not others
    content = log.read_bytes()
    batches = list(iterate_batches(content))
    pairs = pairwise(batches[: len(batches) * 2 // 3])
    *_, stays = (marker for data, marker in pairs if marker.is_control and _ends_a_copy(content, data))
    log.write_bytes(content[: stays.end])
    for stale in (*folder.glob("*.index"), *folder.glob("*.timeindex"), *folder.glob("*.snapshot")):
        stale.unlink()


def _ends_a_copy(content: bytes, batch: RecordBatch) -> bool:
    """Whether the batch's only record is the end of a copy. The record begins with the version of its frame."""
    (record,) = read_records(content, batch)
    return not batch.is_control and record.value is not None and record.value[1] == SEGMENT_METADATA_UPDATE_API_KEY


def numbered(values: Sequence[bytes]) -> list[RECORD]:
    return list(enumerate(values))
