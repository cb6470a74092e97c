"""Two proxies behind a load balancer are restarted one after the other. Clients notice no more than a new socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.rigs.steady_clients import CLIENTS, Seen
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import consecutive_free_ports
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

PORTS = 4
"""Those of a proxy before three brokers."""
CHECK = "option httpchk GET /readyz\n  default-server inter 200ms fall 1 rise 1"


@contextmanager
def balanced(port: int, proxies: list[TidegateProcess], folder: Path) -> Iterator[Path]:
    """Runs haproxy, and yields the socket for its commands.

    It relays `port` to the bootstrap ports of the proxies, and the next ports to their ports for brokers 1 to 3."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert program is not None, "haproxy is not installed (apt-get install haproxy)"
    commands = folder / "haproxy.socket"
    lines = [
        "global",
        f"  stats socket {commands}",
        "defaults",
        "  mode tcp",
        "  timeout connect 5s",
        "  timeout client 1h",
        "  timeout server 1h",
    ]
    lines += ["  option redispatch", "  retries 3", f"  {CHECK}"]
    for number in range(PORTS):
        lines += [f"listen kafka-{number}", f"  bind 127.0.0.1:{port + number}"]
        for name, proxy in enumerate(proxies):
            host, first = proxy.address
            lines.append(f"  server proxy-{name} {host}:{first + number} check port {proxy.admin[1]}")
    file = folder / "haproxy.cfg"
    file.write_text("\n".join([*lines, ""]))
    with subprocess.Popen([program, "-db", "-q", "-f", str(file)]) as process:
        try:
            yield commands
        finally:
            process.terminate()


def are_all_up(commands: Path) -> bool:
    """Whether the load balancer sends clients to every proxy, through every port."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(commands))
        asking.sendall(b"show stat\n")
        rows = b"".join(iter(lambda: asking.recv(65_536), b"")).decode().splitlines()
    states = [row.split(",")[17] for row in rows if ",proxy-" in row]
    return len(states) == 2 * PORTS and set(states) == {"UP"}


def restart(proxy: TidegateProcess) -> None:
    os.kill(proxy.pid, signal.SIGTERM)
    assert proxy.wait() == 0
    proxy.start()


def until_more_is_read(seen: list[Seen], count: int = 50) -> None:
    """Waits until each consumer has read `count` more records."""
    wanted = [len(each.read) + count for each in seen]
    try:
        until(lambda: all(len(each.read) > enough for each, enough in zip(seen, wanted, strict=True)))
    except AssertionError as error:
        for each in seen:
            counts = f"{len(each.written)} written, {len(each.read)} read, {each.assignments} assignments"
            error.add_note(f"{each.name}: {counts}, {each.errors}")
        raise


def test_a_rolling_restart_costs_no_client_anything(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    port = consecutive_free_ports(PORTS)
    seen = [Seen(name) for name in CLIENTS]
    with ExitStack() as stack:
        proxies = []
        for number in (1, 2):
            settings: dict[str, str | int] = {
                "workers": 2,
                "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
            }
            home = tmp_path / f"proxy-{number}"
            proxy = tidegate_over(kafka_of_three, home, settings=settings, advertised_base_port=port)
            proxies.append(stack.enter_context(proxy))
        commands = stack.enter_context(balanced(port, proxies, tmp_path))
        until(commands.exists)
        clients = stack.enter_context(ExitStack())
        for each in seen:
            topic = f"{topic_name}-{each.name}"
            create_topic(kafka_of_three.bootstrap_servers, topic, replicas=3)
            clients.enter_context(CLIENTS[each.name](f"127.0.0.1:{port}", topic, each, tmp_path))
        until_more_is_read(seen)
        assignments = {each.name: each.assignments for each in seen}
        for proxy in proxies:
            until(lambda: are_all_up(commands))
            restart(proxy)
            until_more_is_read(seen)
        clients.close()
    assert {each.name: each.errors for each in seen} == {each.name: [] for each in seen}
    assert {each.name: each.assignments for each in seen} == assignments
    for each in seen:
        assert each.read == sorted(each.written) == list(range(len(each.written))), each.name
