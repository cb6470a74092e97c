"""`Reader`: a thread that reads partitions from random offsets to their end, through one proxy after another.

The consumer is unmodified, and its settings let it fail instead of resetting its position. Records that were certain
before a pass began must be in the pass, unless they lie below a log start that was raised meanwhile.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from tests.drill.acknowledged_records import AcknowledgedRecords, Place
from tests.drill.rig import DrillProxy, DrillRig
from tests.drill.tier_model import TierModel
from tests.drill.violations import DELETED, READ, Violations

PASS_TIMEOUT_S = 40.0
_POLL_S = 0.3
_FROM_THE_START = 0.4
_LOG_NOTHING = 0
_PASSING = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
    }
)
"""The errors of librdkafka when a broker went away. librdkafka itself retries."""


class Reader:
    def __init__(
        self, rig: DrillRig, acknowledged: AcknowledgedRecords, model: TierModel, violations: Violations, seed: int
    ) -> None:
        self._rig = rig
        self._acknowledged = acknowledged
        self._model = model
        self._violations = violations
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self.checked = 0
        self.passes = 0
        self.unfinished = 0
        """The number of passes that a fault kept from their end. The records that they read were checked."""
        self.longest_wait_s = 0.0
        """The longest wait for a certain record during which the proxy and the store stayed up."""
        self.error: str | None = None

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                up = self._rig.surviving()
                if not up:
                    self._stopping.wait(0.2)
                    continue
                self._read_some(self._chance.choice(up), self._chance.choice(self._rig.topics.places))
                self._stopping.wait(0.05)
        except Exception as error:
            self.error = f"a reader ended: {error!r}"
            raise

    def _log_start(self, place: Place) -> int:
        """Returns the log start. Records below it may be deleted at any time."""
        return max(self._acknowledged[place].asked_start, self._model.partitions[place].log_start)

    def _read_some(self, proxy: DrillProxy, place: Place) -> None:
        certain = self._acknowledged[place].certain_from(self._log_start(place))
        if not certain:
            return
        from_start = self._chance.random() < _FROM_THE_START
        start = OFFSET_BEGINNING if from_start else self._chance.choice(certain)
        self.read(proxy, place, start, certain, PASS_TIMEOUT_S)

    def read(self, proxy: DrillProxy, place: Place, start: int, certain: Sequence[int], timeout_s: float) -> bool:
        """Reads from `start` past the last of `certain`. Returns whether it came that far."""
        partition = self._acknowledged[place]
        deleted_start = partition.deleted_start
        seen: set[int] = set()
        next_offset, target = max(0, start), certain[-1] + 1
        deadline_s = time.monotonic() + timeout_s
        with consumer(proxy.bootstrap, place, start) as reading:
            came_at_s = time.monotonic()
            while next_offset < target and time.monotonic() < deadline_s and not self._stopping.is_set():
                came = reading.consume(500, _POLL_S)
                if self._is_undisturbed(proxy, came_at_s):
                    self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - came_at_s)
                if came:
                    came_at_s = time.monotonic()
                for message in came:
                    error, offset, value = message.error(), message.offset(), message.value()
                    if error is not None:
                        if not self._bear(error, place, next_offset, proxy):
                            return True
                        continue
                    assert offset is not None
                    assert isinstance(value, bytes)
                    if offset < next_offset and (seen or start >= 0):
                        self._violations.add(READ, f"{place} {offset} through {proxy.name}: after {next_offset - 1}")
                    if not seen and start < 0 and offset < deleted_start:
                        self._violations.add(DELETED, f"{place} {offset} through {proxy.name}: below {deleted_start}")
                    partition.check(offset, value, proxy.name)
                    if place[1] == 0 and seen and offset != next_offset:
                        self._violations.add(
                            READ,
                            f"{place} through {proxy.name}: {offset} follows {next_offset - 1}, without transactions",
                        )
                    seen.add(offset)
                    next_offset = offset + 1
        self.checked += len(seen)
        self.passes += 1
        self.unfinished += next_offset < target
        # A read from the beginning starts at the current log start.
        first = max(self._log_start(place), start)
        partition.check_complete(certain, seen, first, next_offset, proxy.name)
        return next_offset >= target

    def _is_undisturbed(self, proxy: DrillProxy, since_s: float) -> bool:
        rig = self._rig
        is_up = proxy.is_up and not rig.store_is_away
        return is_up and max(proxy.changed_at_s, rig.store_changed_at_s) < since_s

    def _bear(self, error: KafkaError, place: Place, next_offset: int, proxy: DrillProxy) -> bool:
        """Judges an error. Returns whether the pass continues. Reports the error if no raised log start explains it."""
        if error.code() in _PASSING or error.retriable():
            return True
        if next_offset < self._log_start(place):
            return False
        self._violations.add(READ, f"{place} {next_offset} through {proxy.name}: {error.name()}")
        return False


@contextmanager
def consumer(bootstrap: str, place: Place, start: int) -> Iterator[Consumer]:
    reading = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "check.crcs": True,
            "fetch.queue.backoff.ms": 10,
            "reconnect.backoff.max.ms": 1_000,
            "log_level": _LOG_NOTHING,
        }
    )
    reading.assign([TopicPartition(*place, start)])
    try:
        yield reading
    finally:
        reading.close()
