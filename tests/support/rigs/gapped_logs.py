"""Real logs with a gap in the middle. Each has an untiered twin without a gap, which tells what a client must read.

The records of a gap are removed while no proxy runs. All logs are made at the same time, since an owner waits before it
records a gap."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tests.support.clients.client import READ_COMMITTED, ClientRecord
from tests.support.rigs.loss_rig import SEGMENT_BYTES, Site, alarms
from tests.support.rigs.record_deletion import delete_records
from tests.support.rigs.strict_consumer import local_log_start, log_bytes
from tests.support.rigs.transaction_reference import Reference, reference_of, values_of, whole_log
from tests.support.rigs.transaction_writer import Writer
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import topic_id_of
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import TidegateProcess
from tiers.model.log_start import LogGap

MIB = 1 << 20
RECORD = tuple[int, bytes]
"""An offset and a value."""


def write_head(writer: Writer) -> None:
    """Only full segments are copied. So the last records of `lost` and the ABORT and COMMIT behind them are not."""
    writer.plain(100)
    writer.transaction("ended", 20, commit=False)
    writer.plain(80)
    writer.begin("lost")
    writer.send("lost", 150)
    writer.begin("kept")
    writer.send("kept", 50)
    writer.plain(50)
    writer.send("lost", 140)
    writer.abort("lost")
    writer.commit("kept")


def write_into_gap(writer: Writer) -> None:
    """Two transactions begin in the gap and end behind it."""
    writer.transaction("lost", 20, commit=True)
    writer.begin("torn")
    writer.send("torn", 30)
    writer.begin("saved")
    writer.send("saved", 30)


def write_behind(writer: Writer, count: int) -> None:
    """Writes `count` records in each transaction and between them. Producers whose markers are in the gap continue."""
    writer.send("torn", count)
    writer.send("saved", count)
    writer.abort("torn")
    writer.commit("saved")
    writer.transaction("lost", count, commit=True)
    writer.transaction("kept", count, commit=False)
    writer.transaction("kept", count, commit=True)
    writer.plain(count)


@dataclass(frozen=True)
class History:
    """The records of the whole log, as a broker without a gap returns them."""

    data: list[RECORD]
    """All records, including the aborted ones."""
    reference: Reference
    markers: frozenset[int]


@dataclass
class GappedLog:
    """A topic with both tiers."""

    site: GapSite
    topic: str
    twin: str
    gap: LogGap = field(init=False, repr=False)
    """The gap that the owner must record."""

    def make_topics(self) -> Writer:
        bootstrap = self.site.cluster.bootstrap_servers
        for each in (self.topic, self.twin):
            create_topic(bootstrap, each, config={"segment.bytes": str(MIB)})
        return Writer(bootstrap, self.topic, self.twin)

    @cached_property
    def history(self) -> History:
        """Returns the history of the twin."""
        cluster = self.site.cluster
        log = whole_log(cluster.address(), self.twin, topic_id_of(cluster.bootstrap_servers, self.twin))
        reference = reference_of(log)
        data = values_of(log, (each for each in reference.batches if not each.is_control), 0)
        return History(data, reference, frozenset(each.base_offset for each in reference.batches if each.is_control))

    @property
    def reference(self) -> Reference:
        """Returns the part of the twin's history that the gap leaves."""
        whole = self.history.reference
        batches = [each for each in whole.batches if not self._is_lost(each.base_offset)]
        return whole._replace(visible=self._left(whole.visible), batches=batches)

    @property
    def end(self) -> int:
        return self.history.reference.end_offset

    def expected(self, client: str, isolation: str, offset: int = 0) -> list[RECORD]:
        """Returns the records that a client reads from `offset` on.

        kafka-go handles neither markers nor aborted records. It returns both."""
        history = self.history
        shown = history.reference.visible if isolation == READ_COMMITTED else history.data
        if client == "kafka-go":
            shown = sorted([*history.data, *((marker, b"") for marker in history.markers)])
        return [one for one in self._left(shown) if one[0] >= offset]

    def found(self, records: list[ClientRecord]) -> list[RECORD]:
        """Returns the records without markers."""
        markers = self.history.markers
        return [(each.offset, b"" if each.offset in markers else each.value or b"") for each in records]

    def _left(self, records: list[RECORD]) -> list[RECORD]:
        return [one for one in records if not self._is_lost(one[0])]

    def _is_lost(self, offset: int) -> bool:
        return self.gap.first_offset <= offset < self.gap.next_offset

    def local_log_start(self) -> int:
        return local_log_start(self.site.cluster, self.topic)

    def is_settled(self) -> bool:
        """Whether all full segments are copied, and all but the newest are trimmed."""
        code, out, _ = self.site.tier("segments", self.topic, "--json")
        segments: list[dict[str, Any]] = [] if code else json.loads(out)
        if not segments or segments[-1]["state"] != "COPY_SEGMENT_FINISHED":
            return False
        newest = segments[-1]
        next_offset, local_start = newest["end_offset"] + 1, self.local_log_start()
        is_trimmed = local_start >= newest["start_offset"] > 0
        return is_trimmed and log_bytes(self.site.cluster, self.topic, max(next_offset, local_start)) <= SEGMENT_BYTES


class GapSite(Site):
    """A site that copies only full segments, so the test knows which records are not copied."""

    def __init__(self, cluster: KafkaCluster, home: Path) -> None:
        super().__init__(cluster, home, f"gapped-{uuid.uuid4().hex[:8]}")
        self._tiered = []
        self._more = (
            f'[[topics]]\nname = "{self.topic}-*"\nsegment.bytes = {SEGMENT_BYTES}\nsegment.ms = "7d"\n'
            f"local.retention.bytes = 1"
        )


def delete_to(log: GappedLog, offset: int) -> None:
    """Deletes records at the broker itself."""
    assert delete_records(log.site.cluster.bootstrap_servers, log.topic, offset) == offset


def deleted(log: GappedLog, writer: Writer) -> None:
    """An administrator deletes records up to the middle of a batch. More segments follow."""
    write_into_gap(writer)
    delete_to(log, writer.end_offset - 5)
    write_behind(writer, 50)
    writer.plain(100)


def deleted_before_local(log: GappedLog, writer: Writer) -> None:
    """An administrator deletes records up to the middle of a batch. Less than a segment follows, which stays local."""
    write_into_gap(writer)
    delete_to(log, writer.end_offset - 5)
    write_behind(writer, 10)


def deleted_to_end(log: GappedLog, writer: Writer) -> None:
    """An administrator deletes all records. Nothing follows."""
    writer.transaction("lost", 20, commit=True)
    writer.transaction("kept", 20, commit=False)
    delete_to(log, writer.end_offset)


REMOVALS: Mapping[str, Callable[[GappedLog, Writer], None]] = {
    "deleted": deleted,
    "before-local": deleted_before_local,
    "to-the-end": deleted_to_end,
}
"""Functions that remove records from the broker and write more behind them, by the name of the log."""


@dataclass(frozen=True)
class GappedLogs:
    site: GapSite
    proxy: TidegateProcess
    logs: Mapping[str, GappedLog]

    @property
    def bootstrap(self) -> str:
        return self.proxy.bootstrap_servers


@contextmanager
def gapped_logs(cluster: KafkaCluster, home: Path) -> Iterator[GappedLogs]:
    """Yields a log for each of `REMOVALS`. One proxy has recorded the gaps, and copied and trimmed behind them."""
    site = GapSite(cluster, home)
    logs = {name: GappedLog(site, f"{site.topic}-{name}", f"twin-{site.topic}-{name}") for name in REMOVALS}
    _make(site, logs)
    with site.proxy() as proxy:
        for log in logs.values():
            until(partial(_has_gap, proxy, log))
        for log in logs.values():
            (gap,) = site.bounds(log.topic)["gaps"]
            log.gap = LogGap(**gap)
            until(log.is_settled)
        yield GappedLogs(site, proxy, logs)


def _make(site: GapSite, logs: Mapping[str, GappedLog]) -> None:
    """Makes all logs at the same time, since their transactions mostly wait."""
    with ThreadPoolExecutor(len(logs)) as pool:
        writers = dict(zip(logs, pool.map(_write_head, logs.values()), strict=True))
        with site.proxy():
            for log in logs.values():
                until(log.is_settled)
        removing = [pool.submit(remove, logs[name], writers[name]) for name, remove in REMOVALS.items()]
        for each in removing:
            each.result()


def _write_head(log: GappedLog) -> Writer:
    writer = log.make_topics()
    write_head(writer)
    return writer


def _has_gap(proxy: TidegateProcess, log: GappedLog) -> bool:
    return alarms(proxy, log.topic, "gap") > 0
