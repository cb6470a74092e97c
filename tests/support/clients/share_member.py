"""A member of a share group. It uses the Java client, the only client with share groups."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Self

from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient

from tests.support.clients.java_process import JavaProcess


class AcquiredRecord(NamedTuple):
    partition: int
    offset: int
    value: bytes


class ShareMember:
    """A context manager for one Java process, in which `join` and `leave` may alternate."""

    def __init__(self) -> None:
        self._process = JavaProcess("ShareMember")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.stop()

    def join(self, bootstrap: str, group: str, topic: str) -> None:
        self._process.ask(f"join {bootstrap} {group} {topic}")

    def take(self, count: int) -> list[AcquiredRecord]:
        """Acquires and accepts at least `count` records."""
        taken: list[AcquiredRecord] = []
        while len(taken) < count:
            taken += [_record(*line.split()) for line in self._process.ask("acquire").splitlines()]
            self._process.ask("accept")
        return taken

    def leave(self) -> None:
        self._process.ask("leave")


def start_at_earliest(bootstrap: str, group: str) -> None:
    """Sets a share group to begin at the earliest offset. By default a new share group begins at the end."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    config = ConfigResource(ConfigResourceType.GROUP, group, {"share.auto.offset.reset": "earliest"})
    assert admin.alter_configs([config]) == {"group": {group: "OK"}}
    admin.close()


def _record(partition: bytes, offset: bytes, value: bytes) -> AcquiredRecord:
    return AcquiredRecord(int(partition), int(offset), bytes.fromhex(value.decode()))
