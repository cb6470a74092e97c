"""A real Apache Kafka for tests, benchmark and demo: KRaft brokers as processes, each with its own folder.

* Node ids are 1 to N. Every node is a broker and a controller, in its own rack. Ports stay the same over a restart.
* A started broker has answered ApiVersions and Metadata, and has named every running broker.
* A process is stopped by its own pid and process group, at the latest when Python exits.
* The folder is removed after use. It stays if the start failed or `keep()` was called.

`python -m tests.support.servers.kafka` fetches the jars and prints their folder. `--archive` also makes the class
archive.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.servers.jars import ServerUnavailable, class_archive, jars, java, pom_property
from tests.support.servers.pausing import pause_group
from tests.support.servers.ports import free_ports
from tests.support.servers.running_brokers import running_brokers
from tests.support.servers.speaking import hear

POM = Path(__file__).with_name("pom.xml")
LOG4J = Path(__file__).with_name("log4j2.properties")
KAFKA_VERSION = os.environ.get("KAFKA_VERSION") or pom_property(POM, "kafka.version")

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
PORT_CLASHES_BORNE = 3

SHRINKS_SOON: Mapping[str, str] = {
    "log.segment.bytes": str(1 << 20),  # the smallest value that Kafka 4 accepts
    "log.retention.check.interval.ms": "500",
    "log.segment.delete.delay.ms": "500",
    "log.initial.task.delay.ms": "500",
}
"""Settings for a local log that shrinks soon: segments of 1 MiB, and a retention check twice a second."""

ALONE: Mapping[str, str] = {"broker.session.timeout.ms": "60000"}
"""The settings of a cluster with one broker.

A broker is its own controller, and fences itself if it gets no processor time for 9 s. No other broker can take over.
A client that then learns of no controller does not ask again: librdkafka waits for its whole timeout of a minute."""

SHORT_LIVED = ("-XX:TieredStopAtLevel=1",)
"""Java options for processes that run for minutes: a better compiler would cost more time than it saves.

Not for a benchmark."""

FULLY_COMPILED = ("-XX:TieredStopAtLevel=4",)
"""Java's default, for a benchmark. It overrides `SHORT_LIVED` in front of it."""

CONSOLE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"
CONSOLE_PRODUCER = ("kafka" if KAFKA_VERSION.startswith("3.") else "org.apache.kafka") + ".tools.ConsoleProducer"
TOPIC_COMMAND = "org.apache.kafka.tools.TopicCommand"
CONSUMER_GROUP_COMMAND = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


def kafka_libs() -> Path:
    """Returns the folder of Kafka's jars. The first use fetches them."""
    return jars(POM, f"kafka-{KAFKA_VERSION}", {"kafka.version": KAFKA_VERSION})


def java_command(main: str, *, heap_mib: int, options: Sequence[str] = (), log_level: str = "INFO") -> list[str]:
    """Returns the command line that runs a class of Kafka's jars, without the class's own arguments."""
    libs = kafka_libs()
    opts = [f"-Xmx{heap_mib}m", "-XX:+UseSerialGC", f"-Dlog4j2.configurationFile={LOG4J}"]
    if (archive := class_archive(libs)).is_file():
        opts += [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds*=off"]  # Java ignores an archive that it cannot use
    opts += [f"-Dtidegate.log.level={log_level}", *options]
    return [java(), *opts, "-cp", f"{libs}/*", main]


def make_class_archive() -> None:
    """Makes an archive of the classes that a broker loads. Clients and tools load mostly the same classes."""
    if (archive := class_archive(kafka_libs())).is_file():
        return
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder) / archive.name
        with KafkaCluster(java_options=[*SHORT_LIVED, f"-XX:ArchiveClassesAtExit={made}"]) as kafka:
            to_topic = ["--bootstrap-server", kafka.bootstrap_servers, "--topic", "a"]
            kafka.run_tool(TOPIC_COMMAND, *to_topic, "--create")
            kafka.run_tool(CONSOLE_PRODUCER, *to_topic, stdin="1\n")
            kafka.run_tool(CONSOLE_CONSUMER, *to_topic, "--from-beginning", "--max-messages", "1")
            broker = kafka.brokers[1].process
            kafka.stop_broker(1)
        if broker is not None and broker.returncode >= 0:  # it was not killed while it wrote the archive
            made.rename(archive)


def kafka_uuid() -> str:
    """Returns a random id as Kafka writes it: url-safe base64. It has no leading dash, which begins a tool's option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


class Broker:
    """One node: its folder, its ports and, while it runs, its process."""

    def __init__(self, node_id: int, folder: Path, host: str, port: int, controller_port: int) -> None:
        self.node_id = node_id
        self.folder = folder
        self.host = host
        self.port = port
        self.controller_port = controller_port
        self.secure_ports: dict[str, int] = {}
        """The ports of the other listeners, by name."""
        self.directory_id = kafka_uuid()
        self.properties = folder / "server.properties"
        self.logs = folder / "logs"
        self.output = folder / "broker.out"
        self.process: subprocess.Popen[bytes] | None = None
        hear(f"broker at {host}:{port}", self)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError(f"broker {self.node_id} was not started")
        return self.process.pid

    def spawn(self, options: Sequence[str]) -> None:
        command = java_command("kafka.Kafka", heap_mib=512, options=options)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, str(self.properties)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        if self.running:
            os.killpg(self.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends the process. Kills it if a clean stop takes too long."""
        if self.process is None:
            return
        self.send(signal.SIGCONT)
        self.send(number)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.process.wait(STOP_TIMEOUT_S)
        self.process = None

    def last_output(self, lines: int = 15) -> str:
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class KafkaCluster:
    """A cluster of one to three brokers; a context manager, or `start()` and `stop()`.

    `settings` go to every broker, in addition to the settings of a small test cluster. `advertised_host` is a name or
    address of this machine that the brokers bind and advertise. If it is unique (`127.0.0.2`), a test can scan bytes
    for it. `secure` are the security protocols that get their own listener, with the protocol's name, beside the plain
    listener. `relayed` are more listeners by name, for relays that change no addresses: each has a security protocol,
    and the port of the relay, which the broker advertises.
    """

    def __init__(
        self,
        *,
        brokers: int = 1,
        settings: Mapping[str, str] | None = None,
        advertised_host: str = "127.0.0.1",
        java_options: Sequence[str] = (),
        secure: Sequence[str] = (),
        relayed: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        self.advertised_host = advertised_host
        self.cluster_id = kafka_uuid()
        self.brokers: dict[int, Broker] = {}
        self.folder = Path()
        self._count = brokers
        self._settings = dict(settings or {})
        self._java_options = list(java_options)
        self._relayed = dict(relayed or {})
        self._more_listeners = {**{name: name for name in secure}, **{k: v for k, (v, _) in self._relayed.items()}}
        """The security protocols of the listeners beside the plain one, by the listener's name."""
        self._keep = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def bootstrap_servers_of(self, protocol: str) -> str:
        """Returns `bootstrap_servers` for the listener of one of `secure`."""
        return ",".join(f"{broker.host}:{broker.secure_ports[protocol]}" for broker in self.brokers.values())

    @property
    def bootstrap_servers(self) -> str:
        """The `host:port` of every broker, running or not, joined by commas."""
        return ",".join(f"{broker.host}:{broker.port}" for broker in self.brokers.values())

    def address(self, node_id: int = 1) -> tuple[str, int]:
        return self.brokers[node_id].host, self.brokers[node_id].port

    def start(self) -> Self:
        """Formats and starts every broker. Returns when each broker has named all brokers."""
        kafka_libs()
        atexit.register(self.stop)
        for clashes_left in reversed(range(PORT_CLASHES_BORNE)):
            self._lay_out()
            try:
                self._format()
                for broker in self.brokers.values():
                    broker.spawn(self._java_options)
                self.wait_until_ready()
            except BaseException as error:
                clash = any("Address already in use" in broker.last_output(200) for broker in self.brokers.values())
                if isinstance(error, ServerUnavailable) and clash and clashes_left:
                    self.stop()
                    continue
                if isinstance(error, Exception):  # no interrupt
                    self.keep()
                self.stop()
                raise
            return self
        raise AssertionError("unreachable: the last round returns or raises")

    def stop(self) -> None:
        """Stops the running brokers and removes the folder, unless `keep()` was called. A second call does nothing."""
        for broker in self.brokers.values():  # all at the same time: a controlled shutdown waits for the others
            broker.send(signal.SIGCONT)
            broker.send(signal.SIGTERM if self._count == 1 else signal.SIGKILL)
        for broker in self.brokers.values():
            broker.stop()
        if not self._keep and self.brokers:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.brokers = {}
        atexit.unregister(self.stop)

    def keep(self) -> None:
        """Keeps the folder, with `broker.out` of every broker, after `stop`."""
        self._keep = True

    def stop_broker(self, node_id: int) -> None:
        """Stops a broker cleanly: its leaders move to other brokers first."""
        self.brokers[node_id].stop()

    def kill_broker(self, node_id: int) -> None:
        self.brokers[node_id].stop(signal.SIGKILL)

    def start_broker(self, node_id: int) -> None:
        """Starts a stopped broker again, on the same ports and with its log."""
        self.brokers[node_id].spawn(self._java_options)
        self.wait_until_ready()

    def pause_broker(self, node_id: int) -> None:
        """Stops the broker's process (SIGSTOP). Its connections stay open."""
        broker = self.brokers[node_id]
        if broker.running:
            pause_group(broker.pid)

    def resume_broker(self, node_id: int) -> None:
        self.brokers[node_id].send(signal.SIGCONT)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until every started broker names all started brokers."""
        deadline = time.monotonic() + timeout_s
        started = {node_id: broker for node_id, broker in self.brokers.items() if broker.process is not None}
        for node_id, broker in started.items():
            while True:
                with contextlib.suppress(OSError, struct.error):
                    if set(started) <= set(running_brokers(broker.host, broker.port)):
                        break
                if not broker.running:
                    raise ServerUnavailable(f"broker {node_id} ended: see {broker.output}\n{broker.last_output()}")
                if time.monotonic() > deadline:
                    raise ServerUnavailable(f"broker {node_id} is not ready after {timeout_s:.0f} s: {broker.output}")
                time.sleep(0.1)

    def log_folder(self, topic: str, partition: int, node_id: int = 1) -> Path:
        """Returns the folder of a partition's segment files on a broker."""
        return self.brokers[node_id].logs / f"{topic}-{partition}"

    def run_tool(
        self, main: str, *args: str, stdin: str = "", timeout_s: float = 240.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a Java tool (`CONSOLE_CONSUMER`, ...) to its end. Kills a tool that hangs, and raises TimeoutExpired."""
        command = [*java_command(main, heap_mib=256, options=SHORT_LIVED, log_level="WARN"), *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"{main} ended with {done.returncode}: {done.stderr[-2000:]}{done.stdout[-2000:]}")
        return done

    def _lay_out(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-kafka-"))
        ports = free_ports((2 + len(self._more_listeners)) * self._count, self.advertised_host)
        self.brokers = {}
        for node_id in range(1, self._count + 1):
            folder = self.folder / str(node_id)
            folder.mkdir()
            self.brokers[node_id] = Broker(node_id, folder, self.advertised_host, ports.pop(), ports.pop())
            self.brokers[node_id].secure_ports = {name: ports.pop() for name in self._more_listeners}
        for broker in self.brokers.values():
            lines = "".join(f"{key}={value}\n" for key, value in self._properties(broker).items())
            broker.properties.write_text(lines)

    def _properties(self, broker: Broker) -> dict[str, str]:
        replicas = str(min(3, self._count))
        in_sync = str(min(2, self._count))
        controllers = ",".join(f"{each.host}:{each.controller_port}" for each in self.brokers.values())
        listeners = {"PLAINTEXT": broker.port, "CONTROLLER": broker.controller_port, **broker.secure_ports}
        protocols = ",".join(f"{name}:{protocol}" for name, protocol in self._more_listeners.items())
        ports = {name: port for name, port in listeners.items() if name != "CONTROLLER"}
        ports.update({name: port for name, (_, port) in self._relayed.items()})
        return {
            "process.roles": "broker,controller",
            "node.id": str(broker.node_id),
            "broker.rack": f"rack{broker.node_id}",
            "controller.quorum.bootstrap.servers": controllers,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": f"PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,{protocols}".rstrip(","),
            "listeners": ",".join(f"{name}://{broker.host}:{port}" for name, port in listeners.items()),
            "advertised.listeners": ",".join(f"{name}://{broker.host}:{port}" for name, port in ports.items()),
            "log.dirs": str(broker.logs),
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": "0",
            # By default a broker ends if it has not registered within a minute. A busy machine may need longer.
            "initial.broker.registration.timeout.ms": "600000",
            "default.replication.factor": replicas,
            "min.insync.replicas": in_sync,
            "offsets.topic.num.partitions": "3",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.num.partitions": "3",
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.num.partitions": "3",
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            **(ALONE if self._count == 1 else {}),
            **self._settings,
        }

    def _format(self) -> None:
        voters = ",".join(
            f"{each.node_id}@{each.host}:{each.controller_port}:{each.directory_id}" for each in self.brokers.values()
        )
        tool = java_command("kafka.tools.StorageTool", heap_mib=128, options=SHORT_LIVED, log_level="WARN")
        runs = {
            node_id: subprocess.Popen(
                [*tool, "format", "-t", self.cluster_id, "-c", str(broker.properties), "--initial-controllers", voters],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node_id, broker in self.brokers.items()
        }
        for node_id, run in runs.items():
            _, errors = run.communicate(timeout=START_TIMEOUT_S)
            if run.returncode != 0:
                raise ServerUnavailable(f"the log folder of broker {node_id} could not be formatted: {errors.strip()}")


if __name__ == "__main__":
    try:
        print(kafka_libs())
        if "--archive" in sys.argv:
            make_class_archive()
    except ServerUnavailable as missing:
        sys.exit(str(missing))
