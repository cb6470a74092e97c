"""Runs `tidegate serve` as a process, as a user does: with one TOML file. The admin port tells when it is ready."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import consecutive_free_ports, free_ports
from tests.support.servers.speaking import hear

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TidegateProcess:
    """A context manager, or `start()` and `stop()`. `config` is the text of the TOML file.

    `admin` and `address` are the admin listener and the bootstrap listener in that file. `command` is the module to
    run, with its arguments before `serve`.
    """

    def __init__(
        self, config: str, *, address: tuple[str, int], admin: tuple[str, int], command: Sequence[str] = ("proxy",)
    ) -> None:
        self._command = command
        self.address = address
        self.admin = admin
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-"))
        self.config = self.folder / "tidegate.toml"
        self.config.write_text(config)
        self.output = self.folder / "tidegate.out"
        self._process: subprocess.Popen[bytes] | None = None
        self._keep = False
        hear(f"tidegate at {self.bootstrap_servers}", self)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._keep_after(error)
        self.stop()

    @property
    def bootstrap_servers(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("tidegate was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Returns when `/readyz` answers 200."""
        atexit.register(self.stop)
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command, "serve", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait_until_ready()
        except BaseException as error:
            self._keep_after(error)
            self.stop()
            raise
        return self

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if self._process is None or self._process.poll() is not None:
                raise ServerUnavailable(f"tidegate ended: see {self.output}\n{self.last_output()}")
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"tidegate is not ready after {timeout_s:.0f} s: see {self.output}")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.admin[0]}:{self.admin[1]}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def children(self) -> dict[str, int]:
        """Returns the process ids of the workers, the remote log process and the remote reader, by name."""
        names = {_name_of(pid): pid for pid in _descendants(self.pid)}
        return {name: pid for name, pid in names.items() if name.startswith(("worker-", "remote-"))}

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits until the process has ended, and returns its exit code."""
        if self._process is None:
            raise RuntimeError("tidegate was not started")
        return self._process.wait(timeout_s)

    def metrics(self, timeout_s: float = STOP_TIMEOUT_S) -> str:
        """Returns the current `/metrics`, in Prometheus's text format."""
        with urllib.request.urlopen(f"http://{self.admin[0]}:{self.admin[1]}/metrics", timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of all series with these labels. Most series are 0 from the start."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stops the process. SIGTERM drains it, SIGKILL is a crash. Kills a process that takes too long.

        A second call does nothing."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)  # a stopped process gets no SIGTERM
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_TIMEOUT_S)
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.stop)

    def keep(self) -> None:
        """Keeps the folder, with the settings and `tidegate.out`, after `stop`."""
        self._keep = True

    def _keep_after(self, error: BaseException | None) -> None:
        """Keeps the folder after an error, and names it. An interrupt is none."""
        if isinstance(error, Exception):
            self.keep()
            print(f"the settings and the output of tidegate are kept in {self.folder}", file=sys.stderr)

    def last_output(self, lines: int = 15) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    def cpu_seconds(self) -> float:
        """Returns the user and system time of the process and its children so far."""
        return sum(_cpu_seconds(pid) for pid in [self.pid, *_descendants(self.pid)])


def tidegate_over(
    cluster: KafkaCluster,
    home: Path,
    *,
    tiered: Sequence[str] = (),
    segment_bytes: int = 1 << 20,
    local_retention_bytes: int = 1,
    storage: Mapping[str, str] | None = None,
    settings: Mapping[str, str | int] | None = None,
    upstream: str | None = None,
    advertised_base_port: int | None = None,
    more: str = "",
    command: Sequence[str] = ("proxy",),
) -> TidegateProcess:
    """Returns a proxy in front of `cluster` that soon copies and trims the topics `tiered`. It is not started yet.

    Its state goes to `home/state`. `storage` are the storage manager's settings with `implementation`. Default: the
    tier is the folder `home/tier`. `settings` are keys at the top of the file, `more` are sections at its end.
    With empty ones, the file has no `[storage]`. `upstream` is another listener of the cluster. `advertised_base_port`
    is that of a load balancer before the proxy.
    """
    bootstrap_port = consecutive_free_ports(1 + len(cluster.brokers))
    (admin_port,) = free_ports(1)
    if storage is None:
        (home / "tier").mkdir(parents=True, exist_ok=True)
        storage = {"implementation": "local", "path": str(home / "tier")}
    eager: dict[str, str | int] = {
        "remote.log.manager.task.interval.ms": 1000,
        "remote.log.manager.task.retry.backoff.ms": 500,
        "remote.log.metadata.topic.num.partitions": 4,
    }
    eager.update(settings or {})
    lines = _pairs(eager)
    lines += ["[upstream]", *_pairs({"bootstrap.servers": upstream or cluster.bootstrap_servers})]
    listener: dict[str, str | int] = {
        "host": "127.0.0.1",
        "advertised.host": "127.0.0.1",
        "bootstrap.port": bootstrap_port,
        "base.port": bootstrap_port,
    }
    if advertised_base_port is not None:
        listener["advertised.base.port"] = advertised_base_port
    lines += ["[[listener]]", *_pairs(listener)]
    lines += ["[admin]", *_pairs({"host": "127.0.0.1", "port": admin_port})]
    lines += ["[state]", *_pairs({"path": str(home / "state")})]
    # All clients of a test or of a measurement have one address.
    lines += ["[limits]", *_pairs({"drain.timeout.ms": "10s", "max.total.connections.per.address": 0})]
    lines += ["[storage]", *_pairs(storage)] if storage else []
    for name in tiered:
        rule: dict[str, str | int] = {
            "name": name,
            "local.retention.bytes": local_retention_bytes,
            "segment.bytes": segment_bytes,
            "segment.ms": "5s",
        }
        lines += ["[[topics]]", *_pairs(rule)]
    return TidegateProcess(
        "\n".join([*lines, more, ""]),
        address=("127.0.0.1", bootstrap_port),
        admin=("127.0.0.1", admin_port),
        command=command,
    )


def _pairs(values: Mapping[str, str | int]) -> list[str]:
    """Returns lines of TOML. JSON has the same syntax for strings and numbers."""
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


def is_running(pid: int) -> bool:
    """Whether a process runs. False for a zombie, such as an orphan whose init process does not reap it."""
    return process_state(pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    """Returns the letter for the state of a process: "T" while it is stopped (SIGSTOP). Empty for a gone process."""
    return next(iter(_status(pid)), "")


def _cpu_seconds(pid: int) -> float:
    if not (fields := _status(pid)):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


def _status(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` behind the name. Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # the process ended before the file was opened or read
        return []


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process ended while its threads were listed
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # or one of its threads ended
                for child in map(int, (thread / "children").read_text().split()):
                    found += [child, *_descendants(child)]
    return found
