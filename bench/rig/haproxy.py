"""haproxy in TCP mode before a broker: the floor for a relay, since it looks at no byte."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.servers.jars import ServerUnavailable

BUFFER_BYTES = 128 << 10
START_TIMEOUT_S = 60.0


class Haproxy:
    """A context manager. It relays each of `ports` to the port of the broker beside it.

    With TLS, it ends the clients' TLS with the certificate, and opens a TLS connection of its own to the broker."""

    def __init__(self, ports: dict[int, int], tls_ports: dict[int, int], certificate: Path, ca: Path) -> None:
        if (program := shutil.which("haproxy")) is None:
            raise ServerUnavailable("haproxy is missing: install it (apt-get install haproxy).")
        self._ports = [*ports, *tls_ports]
        self._folder = Path(tempfile.mkdtemp(prefix="tidegate-haproxy-"))
        config = self._folder / "haproxy.cfg"
        lines = [
            "global",
            "  nbthread 1",  # as one process of Tidegate
            "  maxconn 40000",
            f"  tune.bufsize {BUFFER_BYTES}",
            "defaults",
            "  mode tcp",
            "  timeout connect 10s",
            "  timeout client 1h",
            "  timeout server 1h",
        ]
        for port, target in ports.items():
            lines += [f"listen plain-{port}", f"  bind 127.0.0.1:{port}", f"  server broker 127.0.0.1:{target}"]
        for port, target in tls_ports.items():
            lines += [f"listen tls-{port}", f"  bind 127.0.0.1:{port} ssl crt {certificate}"]
            lines += [f"  server broker 127.0.0.1:{target} ssl verify required ca-file {ca}"]
        config.write_text("\n".join([*lines, ""]))
        self._command = [program, "-db", "-f", str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("haproxy was not started")
        return self._process.pid

    def __enter__(self) -> Self:
        atexit.register(self.stop)
        output = self._folder / "haproxy.out"
        with output.open("wb") as out:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        deadline = time.monotonic() + START_TIMEOUT_S
        for port in self._ports:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = output.read_text(errors="replace").strip()[-500:]
                    self.stop()
                    raise ServerUnavailable(f"haproxy did not start: {said}")
                time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process. A second call does nothing."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
