"""What a child process of the supervisor runs: it reads its task from a socket, and ends when the supervisor dies.

Each further byte at the socket lets it read its settings again.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from proxy.config import TidegateConfig, load_config
from proxy.logging_setup import set_up_logging
from proxy.process.app import ChildAdmin, MakeRole, Proxy, serve
from proxy.process.budgets import reader_share_of, remote_log_share_of, share_of
from proxy.process.live_settings import with_live_settings
from proxy.process.remote_log_process import RemoteLogProcess
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
    """What a child does."""

    WORKER = "worker"
    REMOTE_LOG = "remote-log"
    REMOTE_READER = "remote-reader"


class Inherited(StrEnum):
    """A file descriptor that the supervisor hands to a child."""

    ADMIN = "admin"
    PORTS = "ports"
    READS = "reads"
    CHANGES = "changes"


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a child. `config` has the settings of the whole proxy.

    `inherited` names the file descriptors that the child inherits, in order: the listener of its admin pages, which ask
    for `admin_token`; the file of port claims, for a worker; the listener of the remote reader, whose name is
    `reads_address`; that of the remote-log process, whose name is `changes_address`."""

    config: TidegateConfig
    name: str
    duty: Duty
    inherited: tuple[Inherited, ...] = ()
    admin_token: str = ""
    reads_address: bytes | str = b""
    changes_address: bytes | str = b""
    file: Path = Path(os.devnull)
    """The settings file, which SIGHUP lets the child read again."""

    def to_bytes(self) -> bytes:
        """Returns the task as it is at the socket: its length, and the pickled task."""
        pickled = pickle.dumps(self)
        return len(pickled).to_bytes(_LENGTH_BYTES) + pickled


def share_of_duty(config: TidegateConfig, duty: Duty) -> TidegateConfig:
    """Returns the settings of a child with this duty, from those of the whole proxy."""
    shares = {Duty.WORKER: share_of, Duty.REMOTE_LOG: remote_log_share_of, Duty.REMOTE_READER: reader_share_of}
    return shares[duty](config)


def end_timeout_ms(config: TidegateConfig) -> int:
    """Returns how long a child may take from SIGTERM to its exit."""
    return config.limits.drain_timeout_ms + _GRACE_MS


def run_child(fds: Sequence[int]) -> int:
    """Reads the task at the first file descriptor, runs it until SIGTERM, and returns the exit code."""
    control, *inherited = fds
    # Only the supervisor, which is the same program, writes to this socket. A buffer would also take what comes behind.
    try:
        task: Task = pickle.loads(_read(control, int.from_bytes(_read(control, _LENGTH_BYTES))))
    except EOFError:
        return FAILED
    Path("/proc/self/comm").write_text(task.name)
    threading.Thread(target=_obey_supervisor, args=(control, end_timeout_ms(task.config)), daemon=True).start()
    return run(task, control, dict(zip(task.inherited, inherited, strict=True)))


def _read(fd: int, size_bytes: int) -> bytes:
    """Reads exactly this many bytes. Raises `EOFError` if the supervisor dies before."""
    data = b""
    while len(data) < size_bytes:
        part = os.read(fd, size_bytes - len(data))
        if not part:
            raise EOFError("the supervisor died before it had written the task")
        data += part
    return data


def run(task: Task, control: int, fds: Mapping[Inherited, int]) -> int:
    """Runs the task until SIGTERM, and returns the exit code. With `UNUSABLE`, the supervisor gets the reason."""
    set_up_logging(task.config.log.level, task.config.log.format)
    for handler in logging.getLogger().handlers:
        handler.addFilter(partial(_name, task.name))
    admin_fd = fds.get(Inherited.ADMIN)
    admin = None if admin_fd is None else ChildAdmin(socket.socket(fileno=admin_fd), task.admin_token)
    try:
        with unhandled_errors_logged():
            serve(share_of_duty(task.config, task.duty), _role(task, fds), admin, partial(settings_again, task))
    except Exception as error:
        if (reason := _reason_of(error)) is None:
            logger.exception("internal error")
            return FAILED
        with suppress(OSError):  # the supervisor is gone
            os.write(control, reason.encode())
        return UNUSABLE
    return 0


def _reason_of(error: Exception) -> str | None:
    """Returns why the process cannot start until an operator changes something; None for any other error."""
    match error:
        case ExceptionGroup(exceptions=(only,)):
            return _reason_of(only)
        case OSError(strerror=str(reason)):
            return reason
        case ConfigError() | RemoteTierError() | TlsError() | BrokerRefusedError() | OSError():
            return str(error)
    return None


def settings_again(task: Task) -> TidegateConfig:
    """Reads the settings of the child again. Raises `ConfigError`.

    The child's share depends on settings that need a restart, such as `workers`. Those stay as the task has them."""
    return share_of_duty(with_live_settings(task.config, load_config(task.file)), task.duty)


def _role(task: Task, fds: Mapping[Inherited, int]) -> MakeRole:
    match task.duty:
        case Duty.WORKER:
            place = WorkerPlace(task.name, task.reads_address, task.changes_address)
            return partial(Proxy, worker=place, ports=PortClaims(fds[Inherited.PORTS]))
        case Duty.REMOTE_LOG:
            return partial(RemoteLogProcess, listener=socket.socket(fileno=fds[Inherited.CHANGES]))
        case Duty.REMOTE_READER:
            return partial(RemoteReaderProcess, listener=socket.socket(fileno=fds[Inherited.READS]))


def _name(child: str, record: logging.LogRecord) -> bool:
    record.child = child
    return True


def _obey_supervisor(control: int, timeout_ms: int) -> None:
    """Asks for a reload at each byte. Ends this process when the supervisor dies, even if the event loop is blocked.

    The supervisor's death ends the stream. The signal goes to the main thread, where it waits until it has a handler
    (`hold_reloads`)."""
    with suppress(OSError):
        while os.read(control, 1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(timeout_ms / 1000)
    os._exit(FAILED)
