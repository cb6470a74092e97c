"""The processes of a drill: a Kafka, an S3, and several proxies with one metadata topic. It also applies the faults."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.drill.faults import Fault, FaultKind
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.pausing import pause_group
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import VersityGateway

VISIBLE_AFTER_MS = 3_000
SEGMENT_BYTES = 96 * 1024
RETENTION_BYTES = 3 * 1024 * 1024
METADATA_PARTITIONS = 6


@dataclass(frozen=True, slots=True)
class DrillTopics:
    """The topics. `kept` loses no records. `expiring` has a retention by size, and clients delete its records."""

    kept: str
    expiring: str
    partitions: int = 3

    @property
    def names(self) -> tuple[str, str]:
        return self.kept, self.expiring

    @property
    def places(self) -> list[tuple[str, int]]:
        return [(topic, partition) for topic in self.names for partition in range(self.partitions)]


@dataclass(eq=False)
class DrillProxy:
    number: int
    process: TidegateProcess
    is_up: bool = False
    """False while the proxy is stopped, killed or starting."""
    changed_at_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return f"proxy {self.number}"

    @property
    def bootstrap(self) -> str:
        return self.process.bootstrap_servers


class DrillRig:
    """A context manager. It owns the proxies and their folder. The caller owns the cluster and the store."""

    def __init__(
        self,
        cluster: KafkaCluster,
        gateway: VersityGateway,
        home: Path,
        *,
        proxies: int,
        command: Sequence[str] = ("proxy",),
    ) -> None:
        tag = uuid.uuid4().hex[:8]
        self.cluster = cluster
        self.gateway = gateway
        self.home = home
        self.bucket = f"drill-{tag}"
        self.topics = DrillTopics(f"drill-kept-{tag}", f"drill-expiring-{tag}")
        self.metadata_topic = f"__drill-metadata-{tag}"
        self.proxies = [DrillProxy(number, self._process(number, command)) for number in range(proxies)]
        self._disruptions = threading.Lock()
        self.disrupted_at_s = time.monotonic()
        """When a proxy or the broker last went away or came back."""
        self.store_is_away = False
        self.store_changed_at_s = 0.0

    def _process(self, number: int, command: Sequence[str]) -> TidegateProcess:
        home = self.home / f"proxy-{number}"
        home.mkdir()
        process = tidegate_over(
            self.cluster,
            home,
            tiered=self.topics.names,
            segment_bytes=SEGMENT_BYTES,
            storage={"implementation": "s3", "timeout.ms": "3000", **self.gateway.settings(self.bucket)},
            settings={
                "remote.log.metadata.topic.name": self.metadata_topic,
                "remote.log.metadata.topic.num.partitions": METADATA_PARTITIONS,
                "remote.log.visible.after.ms": VISIBLE_AFTER_MS,
                "remote.log.manager.task.interval.ms": 400,
                "remote.log.manager.task.retry.backoff.ms": 200,
                # The cache is small, so that reads go to the store.
                "remote.log.chunk.cache.total.size.bytes": 1 << 20,
            },
            command=command,
        )
        process.keep()
        return process

    def start(self) -> None:
        """Creates the bucket and the topics. Starts the proxies one by one: the first creates the metadata topic."""
        asyncio.run(self.gateway.create_bucket(self.bucket))
        bootstrap, config = self.cluster.bootstrap_servers, {"retention.ms": "-1"}
        create_topic(bootstrap, self.topics.kept, partitions=self.topics.partitions, config=config)
        config |= {"retention.bytes": str(RETENTION_BYTES)}
        create_topic(bootstrap, self.topics.expiring, partitions=self.topics.partitions, config=config)
        for proxy in self.proxies:
            proxy.process.start()
            self._set_up(proxy, True)

    def stop(self) -> None:
        for proxy in self.proxies:
            if proxy.is_up:
                proxy.process.stop()
            else:
                proxy.process.stop(signal.SIGKILL)

    def remove_folders(self) -> None:
        """Removes the proxies' settings and logs. The caller keeps them when an invariant broke."""
        for proxy in self.proxies:
            shutil.rmtree(proxy.process.folder, ignore_errors=True)

    def surviving(self) -> list[DrillProxy]:
        return [proxy for proxy in self.proxies if proxy.is_up]

    def _set_up(self, proxy: DrillProxy, is_up: bool) -> None:
        proxy.is_up, proxy.changed_at_s = is_up, time.monotonic()
        self._disrupted()

    def _set_store(self, *, is_away: bool) -> None:
        self.store_is_away, self.store_changed_at_s = is_away, time.monotonic()

    def _disrupted(self) -> None:
        with self._disruptions:
            self.disrupted_at_s = time.monotonic()

    def apply(self, fault: Fault, heal_early: threading.Event) -> None:
        """Begins the fault, waits for its duration, and ends it."""
        match fault.kind:
            case FaultKind.PROXY_KILL:
                self._kill_proxy(self.proxies[fault.proxy], fault.duration_s, heal_early)
            case FaultKind.PROXY_STALL | FaultKind.PROXY_FREEZE:
                self._freeze_proxy(self.proxies[fault.proxy], fault.duration_s, heal_early)
            case FaultKind.STORE_KILL | FaultKind.STORE_OUTAGE:
                self._set_store(is_away=True)
                self.gateway.kill()
                heal_early.wait(fault.duration_s)
                self.gateway.start()
                self._set_store(is_away=False)
            case FaultKind.STORE_FREEZE:
                self._set_store(is_away=True)
                self.gateway.pause()
                heal_early.wait(fault.duration_s)
                self.gateway.resume()
                self._set_store(is_away=False)
            case FaultKind.BROKER_STALL:
                self.cluster.pause_broker(1)
                self._disrupted()
                heal_early.wait(fault.duration_s)
                self.cluster.resume_broker(1)
                self._disrupted()

    def _kill_proxy(self, proxy: DrillProxy, duration_s: float, heal_early: threading.Event) -> None:
        with proxy.lock:
            self._set_up(proxy, False)
            proxy.process.stop(signal.SIGKILL)
            heal_early.wait(duration_s)
            self._disrupted()
            proxy.process.start()
            self._set_up(proxy, True)

    def _freeze_proxy(self, proxy: DrillProxy, duration_s: float, heal_early: threading.Event) -> None:
        with proxy.lock:
            self._set_up(proxy, False)
            pause_group(proxy.process.pid)
            try:
                heal_early.wait(duration_s)
            finally:
                os.killpg(proxy.process.pid, signal.SIGCONT)
            self._set_up(proxy, True)
