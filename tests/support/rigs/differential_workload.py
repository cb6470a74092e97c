"""A workload from a seed, and its execution on a topic. It does the same on every topic."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tests.support.rigs import record_deletion
from tests.support.rigs.topic_config_client import alter, described
from tests.support.servers.producing import TRANSACTION_TIMEOUT_MS, until_decided

TIMEOUT_S = 300.0
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
MAX_MESSAGE_BYTES = 300_000
Headers = list[tuple[str, str | bytes | None]]


@dataclass(frozen=True, slots=True)
class NewRecord:
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int


@dataclass(frozen=True, slots=True)
class Produce:
    """Produces records. If `commit` is None, they are outside of any transaction."""

    codec: str
    records: Sequence[NewRecord]
    commit: bool | None = None


@dataclass(frozen=True, slots=True)
class Trim:
    """A DeleteRecords request of a user, at a fraction of the log. A fraction above 1 is beyond the end."""

    share: float


@dataclass(frozen=True, slots=True)
class Configure:
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Fence:
    """A second producer takes over the transactional id of the first one during a transaction."""

    codec: str
    records: Sequence[NewRecord]


Operation = Produce | Trim | Configure | Fence


@dataclass(slots=True)
class Topic:
    """A topic as its user knows it. `outcomes` are the answers of all operations: offsets and errors."""

    bootstrap: str
    name: str
    log_start: int = 0
    log_end: int = 0
    offsets: list[int] = field(default_factory=list)
    """The offsets of all acknowledged records, aborted ones included."""
    committed: list[int] = field(default_factory=list)
    outcomes: list[object] = field(default_factory=list)
    producers: dict[tuple[str, bool], Producer] = field(default_factory=dict)
    """The producers, by codec and whether they are transactional."""

    def close(self) -> None:
        self.producers.clear()  # librdkafka's threads end when the last reference is dropped

    def producer(self, codec: str, transactional: bool) -> Producer:
        if (codec, transactional) not in self.producers:
            self.producers[codec, transactional] = self.new_producer(codec, transactional)
        return self.producers[codec, transactional]

    def new_producer(self, codec: str, transactional: bool) -> Producer:
        settings: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self.bootstrap,
            "enable.idempotence": True,
            "compression.type": codec,
            "linger.ms": 20,
            "message.max.bytes": 10 * MAX_MESSAGE_BYTES,
        }
        if not transactional:
            return Producer(settings)
        settings["transaction.timeout.ms"] = TRANSACTION_TIMEOUT_MS
        made = Producer({**settings, "transactional.id": f"{self.name}-{codec}"})
        made.init_transactions(TIMEOUT_S)
        return made


def operations(dice: random.Random, count: int, now_ms: int) -> list[Operation]:
    """Returns a workload with every codec, transactions, a large batch, a too large record, and all settings."""
    made: list[Operation] = [Produce(codec, _records(dice, 20, now_ms)) for codec in CODECS]
    made += [Produce(dice.choice(CODECS), _records(dice, 40, now_ms), commit) for commit in (False, True, False, True)]
    made.append(Produce("none", [_record(dice, now_ms, 2_000) for _ in range(60)]))
    made.append(Produce("none", [_record(dice, now_ms, MAX_MESSAGE_BYTES * 2)]))
    made += [Configure(*each) for each in CONFIGURATIONS]
    made.append(Fence(dice.choice(CODECS), _records(dice, 10, now_ms)))
    made += [_operation(dice, now_ms) for _ in range(count - len(made))]
    dice.shuffle(made)
    return made


def _operation(dice: random.Random, now_ms: int) -> Operation:
    kind = dice.random()
    commit = None if kind < 0.5 else kind < 0.75
    return Produce(dice.choice(CODECS), _records(dice, dice.randint(1, 40), now_ms), commit)


CONFIGURATIONS = (
    ("retention.ms", "86400000"),
    ("retention.bytes", "1000000000"),
    ("compression.type", "producer"),
    ("compression.type", "lz4"),
    ("max.compaction.lag.ms", "-5"),  # refused
    ("no.such.config", "1"),  # refused
)


def _records(dice: random.Random, count: int, now_ms: int) -> list[NewRecord]:
    return [_record(dice, now_ms, dice.choice((0, 10, 200, 1_500))) for _ in range(count)]


def _record(dice: random.Random, now_ms: int, size: int) -> NewRecord:
    """Returns a record with a random timestamp of the last hour. Half of its value compresses."""
    value = dice.randbytes(size // 2).ljust(size, b"x") if dice.random() < 0.9 or size > 1_500 else None
    key = dice.choice((None, b"", dice.randbytes(8)))
    names = dice.sample(("trace", "empty", "none"), dice.randint(0, 3))
    values: dict[str, bytes | None] = {"trace": dice.randbytes(5), "empty": b"", "none": None}
    return NewRecord(key, value, [(name, values[name]) for name in names], now_ms - dice.randrange(3_600_000))


def run(topic: Topic, operation: Operation) -> None:
    match operation:
        case Produce():
            topic.outcomes.append(_produce(topic, operation))
        case Trim(share):
            offset = topic.log_start + int(share * (topic.log_end - topic.log_start))
            topic.outcomes.append(delete_records(topic, offset))
        case Fence():
            topic.outcomes.append(_fence(topic, operation))
        case Configure(key, value):
            (code,) = alter(topic.bootstrap, {topic.name: {key: value}})
            topic.outcomes.append(KafkaError(code).name() if code else None)
            if not code:
                described(topic.bootstrap, topic.name, {key: value})


def delete_records(topic: Topic, offset: int) -> object:
    """Deletes the records below `offset`. -1 is the high watermark."""
    outcome = _outcome(lambda: record_deletion.delete_records(topic.bootstrap, topic.name, offset))
    if isinstance(outcome, int):
        topic.log_start = outcome
    return outcome


def _outcome(ask: Callable[[], object]) -> object:
    """Returns the answer, or the name of the error."""
    try:
        return ask()
    except KafkaException as error:
        return error.args[0].name()


def _produce(topic: Topic, operation: Produce) -> object:
    producer = topic.producer(operation.codec, operation.commit is not None)
    if operation.commit is not None:
        producer.begin_transaction()
    answers = _send(topic, producer, operation.records)
    if operation.commit is True:
        producer.commit_transaction(TIMEOUT_S)
    elif operation.commit is False:
        producer.abort_transaction(TIMEOUT_S)
    if operation.commit is not None:
        until_decided(topic.bootstrap, topic.name)  # otherwise the next operation's records may come before the marker
    _note(topic, answers, operation.commit)
    return answers


def _fence(topic: Topic, operation: Fence) -> object:
    first = topic.producer(operation.codec, transactional=True)
    first.begin_transaction()
    answers = _send(topic, first, operation.records)
    topic.producers[operation.codec, True] = topic.new_producer(operation.codec, transactional=True)
    _note(topic, answers, commit=False)
    return [*answers, _outcome(lambda: first.commit_transaction(TIMEOUT_S))]


def _send(topic: Topic, producer: Producer, records: Sequence[NewRecord]) -> list[int | str]:
    """Sends the records. Returns the offset of each, or the name of its error."""
    answers: list[int | str] = []

    def answered(error: KafkaError | None, message: Message) -> None:
        offset = message.offset()
        answers.append(error.name() if error is not None else -1 if offset is None else offset)

    for record in records:
        producer.produce(
            topic.name,
            record.value,
            record.key,
            partition=0,
            headers=record.headers,
            timestamp=record.timestamp,
            on_delivery=answered,
        )
    producer.flush(TIMEOUT_S)
    return answers


def _note(topic: Topic, answers: Sequence[int | str], commit: bool | None) -> None:
    offsets = [answer for answer in answers if isinstance(answer, int)]
    topic.offsets += offsets
    topic.committed += offsets if commit is not False else []
    if offsets:
        topic.log_end = offsets[-1] + 1 + (commit is not None)
