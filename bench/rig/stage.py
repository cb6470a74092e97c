"""The servers of a run, each started when a scenario first asks for it, and the topics that they hold."""

from __future__ import annotations

import asyncio
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from bench.clients.backfill_reader import Range
from bench.clients.java_tools import FILL, MIB, JavaTools
from bench.measure.processes import tree
from bench.offsets import EARLIEST, EARLIEST_LOCAL, LATEST, list_offsets
from bench.rig.modelled_store import ModelledStore
from bench.rig.native_tier import TOPIC_SETTINGS, NativeTier
from bench.rig.relay_process import RelayProcess
from bench.rig.size import Size
from bench.rig.store_model import StoreModel
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.own_server import OwnServer
from tests.support.servers.ports import free_ports
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import VersityGateway

BROKER_SETTINGS: Mapping[str, str] = {
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "log.initial.task.delay.ms": "1000",
}
CIPHER = "TLS_AES_256_GCM_SHA384"
BUCKET = "bench"
MOVE_TIMEOUT_S = 240.0
SEGMENT_BYTES = 16 << 20
STAYING_RECORDS = 2 * SEGMENT_BYTES // 1024
"""The newest segments of a partition stay on the broker: the one that is open, and the newest that is copied."""
VISIBLE_AFTER_MS = 1000
DEFAULT_TIMES_MS = {
    "remote.log.visible.after.ms": 10_000,
    "remote.log.manager.task.interval.ms": 30_000,
    "remote.log.manager.task.retry.backoff.ms": 1_000,
}
OTHER_FILES = 600
"""The open files of a proxy beside those of its connections."""

BROKER, TIDEGATE, NATIVE, HAPROXY = "broker", "Tidegate", "native KIP-405", "haproxy"
"""The names of what clients speak to."""
FOLDER = "folder"
"""The store that is a folder of this machine."""


@dataclass(frozen=True, slots=True)
class History:
    """A topic with one partition whose records a backfill reads, and the part of it that left the broker's log."""

    topic: str
    range: Range

    @property
    def mib(self) -> int:
        """The size of the range, of records of 1 KiB."""
        return (self.range.end - self.range.start) // 1024


@dataclass(frozen=True, slots=True)
class Peers:
    """The paths of proxies that a user wants to compare. None: leave it out."""

    kafka_proxy: Path | None = None
    """The binary of grepplabs kafka-proxy."""
    kroxylicious: Path | None = None
    """The folder of Kroxylicious."""


class Stage:
    """A context manager. Everything that was started ends with it."""

    def __init__(self, size: Size, console: Console, peers: Peers) -> None:
        self.size = size
        self.peers = peers
        self.console = console
        self.home = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
        self._stack = ExitStack()
        self._homes = 0
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # for the servers, which inherit it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    @cached_property
    def authority(self) -> Authority:
        return Authority(self.home / "certificates")

    @cached_property
    def relay_ports(self) -> dict[str, int]:
        """The ports of a relay that changes no addresses, by the listener of the broker behind it."""
        plain, tls = free_ports(2)
        return {"RELAYED": plain, "RELAYED_TLS": tls}

    @cached_property
    def kafka(self) -> KafkaCluster:
        """A broker with listeners for direct clients, with and without TLS, and for those behind such a relay."""
        settings = {
            **BROKER_SETTINGS,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.authority.identity("broker")),
            "ssl.enabled.protocols": "TLSv1.3",
            "ssl.cipher.suites": CIPHER,
        }
        ports = self.relay_ports
        relayed = {"RELAYED": ("PLAINTEXT", ports["RELAYED"]), "RELAYED_TLS": ("SSL", ports["RELAYED_TLS"])}
        cluster = KafkaCluster(settings=settings, secure=["SSL"], relayed=relayed)
        return self._stack.enter_context(cluster)

    @cached_property
    def native(self) -> NativeTier:
        return self._stack.enter_context(NativeTier(self.home / "native"))

    @cached_property
    def java(self) -> JavaTools:
        tools = JavaTools()
        self._stack.callback(tools.stop)
        return tools

    @cached_property
    def s3(self) -> VersityGateway:
        server = self._stack.enter_context(VersityGateway())
        asyncio.run(server.create_bucket(BUCKET))
        return server

    def modelled(self, model: StoreModel) -> ModelledStore:
        """Returns the running relay for a model before the S3 server."""
        if model.name not in self._modelled:
            self._modelled[model.name] = self._stack.enter_context(ModelledStore(self.s3.port, model))
        return self._modelled[model.name]

    @cached_property
    def _modelled(self) -> dict[str, ModelledStore]:
        return {}

    def storage(self, store: StoreModel | str) -> dict[str, str]:
        """Returns the settings of `[storage]` for a store: a model, `FOLDER`, or `s3` for the S3 server itself."""
        if store == FOLDER:
            folder = self.home / "tier"
            folder.mkdir(exist_ok=True)
            return {"implementation": "local", "path": str(folder)}
        settings = {"implementation": "s3", **self.s3.settings(BUCKET)}
        if isinstance(store, StoreModel):
            settings["endpoint.url"] = self.modelled(store).endpoint_url
        return settings

    @contextmanager
    def tidegate(
        self,
        store: StoreModel | str,
        *topics: str,
        workers: int = 0,
        upstream: str | None = None,
        more: str = "",
        segment_bytes: int = SEGMENT_BYTES,
        is_eager: bool = False,
    ) -> Iterator[TidegateProcess]:
        """Runs a proxy with an empty state, so with cold caches, that tiers `topics` in that store.

        An eager proxy copies and trims within seconds. Others have the default times."""
        self._homes += 1
        times = {"remote.log.visible.after.ms": VISIBLE_AFTER_MS} if is_eager else DEFAULT_TIMES_MS
        settings: dict[str, str | int] = {**times, "workers": workers}
        if store == FOLDER:  # its segments are not in the other stores, so they have a metadata topic of their own
            settings["remote.log.metadata.topic.name"] = "__remote_log_metadata_in_folder"
        process = tidegate_over(
            self.kafka,
            self.home / f"tidegate-{self._homes}",
            tiered=topics,
            segment_bytes=segment_bytes,
            storage=self.storage(store),
            settings=settings,
            upstream=upstream,
            more=more,
        )
        (self.home / f"tidegate-{self._homes}").mkdir()
        with process as proxy:
            yield proxy

    @cached_property
    def local_history(self) -> History:
        """A topic that the broker keeps."""
        return self._filled(self.kafka, "history-local", {})

    @cached_property
    def s3_history(self) -> History:
        """A topic that is in the S3 server, so in every modelled store too."""
        with self.tidegate("s3", "history", is_eager=True):
            return self._filled(self.kafka, "history", {}, until=self._moved)

    @cached_property
    def folder_history(self) -> History:
        with self.tidegate(FOLDER, "history-folder", is_eager=True):
            return self._filled(self.kafka, "history-folder", {}, until=self._moved)

    @cached_property
    def native_history(self) -> History:
        return self._filled(self.native, "history", TOPIC_SETTINGS, until=self._moved_natively)

    def topic(self, cluster: KafkaCluster, name: str, partitions: int = 1) -> str:
        """Creates a topic that is not tiered, unless it exists."""
        if (cluster.cluster_id, name) not in self._topics:
            create_topic(cluster.bootstrap_servers, name, partitions=partitions)
            self._topics.add((cluster.cluster_id, name))
        return name

    @cached_property
    def _topics(self) -> set[tuple[str, str]]:
        return set()

    @cached_property
    def passed_topic(self) -> str:
        """A topic of four partitions that is not tiered, with `size.passed_mib`."""
        name = self.topic(self.kafka, "passed", partitions=4)
        self.java.produce(self.kafka.bootstrap_servers, name, self.size.passed_mib, FILL)
        return name

    def _filled(
        self,
        cluster: KafkaCluster,
        topic: str,
        settings: Mapping[str, str],
        until: Callable[[KafkaCluster, str], int] | None = None,
    ) -> History:
        began = time.monotonic()
        config = {"segment.bytes": str(SEGMENT_BYTES), **settings}
        create_topic(cluster.bootstrap_servers, topic, config=config)
        self.java.produce(cluster.bootstrap_servers, topic, self.size.history_mib, FILL)
        end = self.size.history_mib * MIB // 1024
        if until is not None:
            deadline = time.monotonic() + MOVE_TIMEOUT_S
            whole = end
            while (end := until(cluster, topic)) < whole - STAYING_RECORDS:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"only {end / whole:.0%} of {topic} left the broker")
                time.sleep(0.2)
        self.say(f"{topic}: {self.size.history_mib} MiB written and moved in {time.monotonic() - began:.0f} s")
        return History(topic, Range(0, 0, end))

    @staticmethod
    def _moved(cluster: KafkaCluster, topic: str) -> int:
        return list_offsets(cluster.address(), topic, [0], EARLIEST).get(0, 0)

    @staticmethod
    def _moved_natively(cluster: KafkaCluster, topic: str) -> int:
        return list_offsets(cluster.address(), topic, [0], EARLIEST_LOCAL).get(0, 0)


def processes_of(
    server: KafkaCluster | TidegateProcess | OwnServer | RelayProcess,
) -> Callable[[], list[int]]:
    """Returns a function that names the processes of a server."""
    if isinstance(server, KafkaCluster):
        return lambda: [broker.pid for broker in server.brokers.values()]
    return lambda: tree(server.pid)


def most_connections() -> int:
    """Returns how many connections a proxy can serve within the limit of open files: each takes two of them."""
    return max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES) // 2)


def end_offset(cluster: KafkaCluster, topic: str, partition: int = 0) -> int:
    return list_offsets(cluster.address(), topic, [partition], LATEST)[partition]
