"""What clients can speak to instead of the broker: Tidegate, and the relays and proxies that it is compared with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure.processes import Processes
from bench.rig.relay_process import RelayProcess
from bench.rig.stage import BROKER, CIPHER, FOLDER, HAPROXY, TIDEGATE, Stage, most_connections, processes_of
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.ports import consecutive_free_ports, free_ports

BUFFER_BYTES = 128 << 10


@dataclass(frozen=True)
class Way:
    """Something that clients speak to: its address, its processes, and the settings of Java's and librdkafka's clients.

    `port` accepts the requests of the one broker."""

    name: str
    bootstrap: str
    port: int
    processes: Processes
    java: Mapping[str, str] = field(default_factory=dict)
    librdkafka: Mapping[str, str] = field(default_factory=dict)


class Haproxy(RelayProcess):
    """haproxy in TCP mode, on one thread. It relays `port` to the broker's `target_port`.

    With a certificate and an authority, it ends the clients' TLS, and opens a TLS connection of its own to the
    broker."""

    def __init__(self, port: int, target_port: int, tls: tuple[Path, Path] | None = None) -> None:
        super().__init__(HAPROXY, [port])
        server, bind = f"127.0.0.1:{target_port}", f"127.0.0.1:{port}"
        if tls is not None:
            certificate, ca = tls
            bind += f" ssl crt {certificate}"
            server += f" ssl verify required ca-file {ca}"
        self._config = f"""
global
  nbthread 1
  maxconn {most_connections()}
  tune.bufsize {BUFFER_BYTES}
defaults
  mode tcp
  timeout connect 10s
  timeout client 1h
  timeout server 1h
listen kafka
  bind {bind}
  server broker {server}
"""

    def command(self) -> list[str]:
        if (program := shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")) is None:
            raise ServerUnavailable("haproxy is not installed (apt-get install haproxy)")
        file = self.folder / "haproxy.cfg"
        file.write_text(self._config)
        return [program, "-db", "-f", str(file)]


class KafkaProxy(RelayProcess):
    """grepplabs kafka-proxy, with buffers of 128 KiB. `program` is its binary."""

    def __init__(self, program: Path, port: int, broker_port: int) -> None:
        super().__init__("grepplabs", [port])
        self._command = [str(program), "server", "--http-disable", "--log-level", "error"]
        self._command += ["--bootstrap-server-mapping", f"127.0.0.1:{broker_port},127.0.0.1:{port}"]
        for direction in ("request", "response"):
            self._command += [f"--proxy-{direction}-buffer-size", str(BUFFER_BYTES)]

    def command(self) -> list[str]:
        return self._command


class Kroxylicious(RelayProcess):
    """Kroxylicious without filters. `home` is the folder of its distribution."""

    def __init__(self, home: Path, first_port: int, broker_port: int) -> None:
        super().__init__("Kroxylicious", [first_port])
        self._program = home / "bin" / "kroxylicious-start.sh"
        self._config = f"""
virtualClusters:
  - name: bench
    targetCluster:
      bootstrapServers: 127.0.0.1:{broker_port}
    gateways:
      - name: default
        portIdentifiesNode:
          bootstrapAddress: 127.0.0.1:{first_port}
          nodeStartPort: {first_port + 1}
          nodeIdRanges:
            - name: brokers
              start: 1
              end: 1
"""

    def command(self) -> list[str]:
        file = self.folder / "kroxylicious.yaml"
        file.write_text(self._config)
        return [str(self._program), "--config", str(file)]


@contextmanager
def ways(stage: Stage, notes: list[str], *, tls: bool = False, workers: int = 0) -> Iterator[list[Way]]:
    """Runs everything that can stand before the broker, and yields it with the broker itself, which comes first.

    Adds to `notes` what is missing and why. The peers that a user names by path are measured in plain text only."""
    broker = stage.kafka.brokers[1]
    ca = stage.authority.ca
    clients: dict[str, Mapping[str, str]] = {}
    if tls:
        java = {"security.protocol": "SSL", "ssl.truststore.type": "PEM", "ssl.truststore.location": str(ca)}
        clients = {"java": java, "librdkafka": {"security.protocol": "ssl", "ssl.ca.location": str(ca)}}
    direct_port = broker.secure_ports["SSL"] if tls else broker.port
    found = [Way(BROKER, f"127.0.0.1:{direct_port}", direct_port, processes_of(stage.kafka), **clients)]
    with ExitStack() as stack:

        def add(relay: RelayProcess, port: int) -> None:
            try:
                running = stack.enter_context(relay)
            except (ServerUnavailable, OSError) as missing:
                notes.append(f"{relay.name} was left out: {missing}.")
                return
            found.append(Way(relay.name, f"127.0.0.1:{port}", port, processes_of(running), **clients))

        relay_port, target = stage.relay_ports["RELAYED_TLS" if tls else "RELAYED"], "RELAYED_TLS" if tls else "RELAYED"
        certificates = (stage.authority.identity("haproxy"), ca) if tls else None
        add(Haproxy(relay_port, broker.secure_ports[target], certificates), relay_port)
        if not tls and stage.peers.kafka_proxy is not None:
            (port,) = free_ports(1)
            add(KafkaProxy(stage.peers.kafka_proxy, port, broker.port), port)
        if not tls and stage.peers.kroxylicious is not None:
            port = consecutive_free_ports(3)
            add(Kroxylicious(stage.peers.kroxylicious, port, broker.port), port)
        more, upstream = "", None
        if tls:
            upstream = stage.kafka.bootstrap_servers_of("SSL")
            more = f'[listener.tls]\ncertificate = "{stage.authority.identity("tidegate")}"\n'
            more += f'[upstream.tls]\nca = "{ca}"'
        tiered = stage.folder_history.topic
        proxy = stack.enter_context(stage.tidegate(FOLDER, tiered, workers=workers, upstream=upstream, more=more))
        name = f"{TIDEGATE}, {workers} workers" if workers else TIDEGATE
        node_port = proxy.address[1] + 1
        found.append(Way(name, proxy.bootstrap_servers, node_port, processes_of(proxy), **clients))
        yield found


CIPHER_NOTE = f"TLS is TLS 1.3 with {CIPHER} on both sides of every relay."
