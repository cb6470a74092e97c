"""The main program of a child process: reads its task from standard input, and ends when the supervisor dies.

Each further byte on standard input lets it read its settings again.

The supervisor also puts the child's name on the command line, so that `ps` shows it.
"""

from __future__ import annotations

if __name__ == "__main__":
    import signal as _signal

    # The imports take seconds. SIGHUP waits until the process can read its settings again, and does not end it.
    # Threads inherit that, and only the main thread ever takes SIGHUP.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGHUP})

import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from proxy.config import TidegateConfig, load_config
from proxy.logging_setup import set_up_logging
from proxy.process.app import ChildAdmin, MakeRole, Proxy, RemoteLogProcess, serve
from proxy.process.budgets import reader_share_of, remote_log_share_of, share_of
from proxy.process.reload import with_live_settings
from proxy.process.remote_reader import RemoteReaderProcess
from proxy.process.remote_tier import WorkerPlace
from proxy.process.start.port_claims import PortClaims
from proxy.process.start.unhandled_errors import unhandled_errors_logged
from proxy.process.supervisor import UNUSABLE
from tiers.access.open_tier import RemoteTierError
from tiers.broker.tls import TlsError
from tiers.config.tier_config import ConfigError
from tiers.errors import BrokerRefusedError

logger = logging.getLogger(__name__)

FAILED = 1
_LENGTH_BYTES = 8
_GRACE_MS = 10_000
"""How long closing may take after the drain."""


class Duty(StrEnum):
    """What a child does. The child runs as `__main__`, so its own class is another one, and the values are compared."""

    WORKER = "worker"
    REMOTE_LOG = "remote-log"
    REMOTE_READER = "remote-reader"


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a child. `config` has the settings of the whole proxy.

    `admin_fd` is the inherited listener of the child's admin pages, which ask for `admin_token`. `ports_fd` is the
    inherited file of port claims, for a worker. `reads_fd` is the inherited listener of the remote reader, and
    `reads_address` is its name."""

    config: TidegateConfig
    name: str
    duty: Duty
    admin_fd: int | None
    admin_token: str = ""
    ports_fd: int | None = None
    reads_fd: int | None = None
    reads_address: bytes | str = b""
    file: Path = Path(os.devnull)
    """The settings file, which SIGHUP lets the child read again."""

    def to_bytes(self) -> bytes:
        """Returns the task as it is on standard input: its length, and the pickled task."""
        pickled = pickle.dumps(self)
        return len(pickled).to_bytes(_LENGTH_BYTES) + pickled


def share_of_duty(config: TidegateConfig, duty: Duty) -> TidegateConfig:
    """Returns the settings of a child with this duty, from those of the whole proxy."""
    shares = {Duty.WORKER: share_of, Duty.REMOTE_LOG: remote_log_share_of, Duty.REMOTE_READER: reader_share_of}
    return shares[Duty(duty.value)](config)


def end_timeout_ms(config: TidegateConfig) -> int:
    """Returns how long a child may take from SIGTERM to its exit."""
    return config.limits.drain_timeout_ms + _GRACE_MS


def main() -> None:
    fd = sys.stdin.fileno()
    # Only the supervisor, which is the same program, writes to this pipe. A buffer would also take what comes behind.
    sys.exit(run(pickle.loads(_read(fd, int.from_bytes(_read(fd, _LENGTH_BYTES))))))


def _read(fd: int, size_bytes: int) -> bytes:
    """Reads exactly this many bytes. Raises `EOFError` if the supervisor dies before."""
    data = b""
    while len(data) < size_bytes:
        part = os.read(fd, size_bytes - len(data))
        if not part:
            raise EOFError("the supervisor died before it had written the task")
        data += part
    return data


def run(task: Task) -> int:
    """Runs the task until SIGTERM, and returns the exit code."""
    threading.Thread(target=_obey_supervisor, args=(end_timeout_ms(task.config),), daemon=True).start()
    set_up_logging(task.config.log.level, task.config.log.format)
    for handler in logging.getLogger().handlers:
        handler.addFilter(partial(_name, task.name))
    admin = None if task.admin_fd is None else ChildAdmin(socket.socket(fileno=task.admin_fd), task.admin_token)
    try:
        with unhandled_errors_logged():
            serve(share_of_duty(task.config, task.duty), _role(task), admin, partial(settings_again, task))
    except (ConfigError, RemoteTierError, TlsError, BrokerRefusedError, OSError) as error:
        said = error.strerror if isinstance(error, OSError) else None
        sys.stderr.write(f"tidegate: {said or error}\n")
        return UNUSABLE
    except Exception:
        logger.exception("internal error")
        return FAILED
    return 0


def settings_again(task: Task) -> TidegateConfig:
    """Reads the settings of the child again. Raises `ConfigError`.

    The child's share depends on settings that need a restart, such as `workers`. Those stay as the task has them."""
    return share_of_duty(with_live_settings(task.config, load_config(task.file)), task.duty)


def _role(task: Task) -> MakeRole:
    match task.duty:
        case Duty.WORKER:
            ports = None if task.ports_fd is None else PortClaims(task.ports_fd)
            return partial(Proxy, worker=WorkerPlace(task.name, task.reads_address), ports=ports)
        case Duty.REMOTE_LOG:
            return RemoteLogProcess
        case Duty.REMOTE_READER:
            assert task.reads_fd is not None
            return partial(RemoteReaderProcess, listener=socket.socket(fileno=task.reads_fd))


def _name(child: str, record: logging.LogRecord) -> bool:
    record.child = child
    return True


def _obey_supervisor(timeout_ms: int) -> None:
    """Asks for a reload at each byte. Ends this process when the supervisor dies, even if the event loop is blocked.

    The supervisor's death closes the pipe. The signal goes to the main thread, where it waits until it has a handler
    (`hold_reloads`)."""
    while os.read(sys.stdin.fileno(), 1):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(timeout_ms / 1000)
    os._exit(FAILED)


if __name__ == "__main__":
    main()
