"""The options of `kafka_tiered`: those of Spark's own Kafka source, with the same names and checks, and a few more.

Keys are case-insensitive, as in Spark. An unknown key is an error, so that a misspelled option cannot go unnoticed. By
default a batch reads from `earliest` to `latest`, and a stream starts at `latest`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar

from pipeline.config import PipelineConfig, load_pipeline_config
from pipeline.source.kafka_identity import IDENTITY, WITHOUT_EFFECT, upstream_of_options
from pipeline.source.local_read import TIMEOUT_MS
from tiers.config.upstream_config import UpstreamConfig
from tiers.texts import did_you_mean

logger = logging.getLogger(__name__)

EARLIEST, LATEST = -2, -1
DEFAULT_SPLIT_BYTES = 64 << 20

TopicPartition = tuple[str, int]
OnNoMatch = Literal["error", "latest"]
E = TypeVar("E", bound=StrEnum)

_SUBSCRIPTIONS = ("subscribe", "subscribePattern", "assign")
_OPTIONS = (
    *_SUBSCRIPTIONS,
    *("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets", "startingOffsetsByTimestampStrategy"),
    *("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets"),
    *("minPartitions", "maxRecordsPerPartition", "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("failOnDataLoss", "includeHeaders", "kafkaConsumer.pollTimeoutMs"),
    *("config", "splitBytes", "tier", "access", "columns", "pushdown"),
    *("kafka.isolation.level", *(f"kafka.{name}" for name in sorted(IDENTITY))),
)
_IGNORED = {
    name.lower(): name
    for name in (
        *("groupIdPrefix", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
        *(f"kafka.{name}" for name in WITHOUT_EFFECT),
    )
}
"""Accepted with a warning: there is no consumer group, and requests are retried until their deadline."""
_OF_SPARK = ("path", "paths")
"""Options that Spark adds itself."""
REFUSED = {
    "kafka.auto.offset.reset": "is not supported: set startingOffsets to earliest or latest instead",
    "kafka.key.deserializer": "is not supported: keys are bytes; use DataFrame operations",
    "kafka.value.deserializer": "is not supported: values are bytes; use DataFrame operations",
    "kafka.enable.auto.commit": "is not supported",
    "kafka.interceptor.classes": "is not supported",
}


class OptionError(ValueError):
    """An invalid option. The message is for the user."""


class Tier(StrEnum):
    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


class Access(StrEnum):
    DIRECT = "direct"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Subscription:
    """The topics or partitions to read. Exactly one of the fields is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[TopicPartition, ...] = ()

    def topics_among(self, known: Iterable[str]) -> list[str]:
        """Returns the topic names. Topics given by name are included even if they are not in `known`. A pattern matches
        whole names, as in Kafka."""
        if self.pattern:
            return sorted(name for name in known if re.fullmatch(self.pattern, name))
        return sorted({*self.topics, *(topic for topic, _ in self.assigned)})


@dataclass(frozen=True, slots=True)
class Position:
    """Where to start, or to end (exclusive). `default` applies to every partition; if it is None, `each` has the
    values.

    The values are offsets (or `EARLIEST`, `LATEST`), or timestamps in ms if `is_time` is set."""

    default: int | None
    each: Mapping[TopicPartition, int] = field(default_factory=dict)
    is_time: bool = False
    on_no_match: OnNoMatch = "error"
    """What to do if no record is as late as a given timestamp."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    subscription: Subscription
    starting: Position
    ending: Position
    tier: Tier
    access: Access
    config: PipelineConfig | None
    """The tier's configuration; set with `Access.DIRECT`."""
    kafka: UpstreamConfig
    """The address and identity for records that are not read from the store."""
    is_committed_only: bool
    include_headers: bool
    columns: tuple[str, ...]
    """Empty means all columns."""
    min_partitions: int | None
    max_records_per_partition: int | None
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    fail_on_data_loss: bool
    poll_timeout_ms: int
    split_bytes: int
    pushes_filters: bool = False
    parallelism: int = 1
    """The cores among which a small read is divided."""


def column_options(options: Mapping[str, str]) -> tuple[bool, tuple[str, ...]]:
    """Parses only `includeHeaders` and `columns`, which the schema needs before anything is opened."""
    given = _Given(options)
    columns = given.text("columns")
    names = () if columns is None else tuple(name.strip() for name in columns.split(",") if name.strip())
    return given.flag("includeHeaders", False), names


def subscription_option(options: Mapping[str, str]) -> Subscription | None:
    """Returns None if no subscription is given. Raises `OptionError`, also for an unknown option."""
    given = _Given(options)
    given.check_names()
    return _subscription(given) if any(map(given.has, _SUBSCRIPTIONS)) else None


def parse_options(options: Mapping[str, str], *, is_streaming: bool, parallelism: int = 1) -> ReadOptions:
    """Parses all options and reads the file that `config` names. A given `splitBytes` counts more than `parallelism`.

    Raises `OptionError`, `ConfigError`."""
    given = _Given(options)
    given.check_names()
    for name in given.options.keys() & _IGNORED.keys():
        logger.warning("the option %s has no effect", _IGNORED[name])
    subscription = _subscription(given)
    if is_streaming:
        if given.has("endingOffsets"):
            raise OptionError("ending offset not valid in streaming queries")
        if given.has("endingOffsetsByTimestamp") or given.has("endingTimestamp"):
            raise OptionError("ending timestamp not valid in streaming queries")
    starting = _position(given, "starting", LATEST if is_streaming else EARLIEST)
    ending = _position(given, "ending", LATEST)
    if not is_streaming:
        _check_batch(given, starting, ending)
    smallest, greatest = given.positive("minOffsetsPerTrigger"), given.positive("maxOffsetsPerTrigger")
    if smallest is not None and greatest is not None and smallest > greatest:
        raise OptionError(f"minOffsetsPerTrigger ({smallest}) is higher than maxOffsetsPerTrigger ({greatest})")
    path = given.text("config")
    config = None if path is None else load_pipeline_config(Path(path))
    tier = given.choice("tier", Tier, Tier.AUTO)
    has_store = config is not None and config.storage is not None
    access = given.choice("access", Access, Access.DIRECT if has_store or tier is Tier.LOCAL else Access.PROXY)
    if access is Access.DIRECT and not has_store and tier is not Tier.LOCAL:
        raise OptionError("access=direct needs the option config: a file with a [storage] section")
    if access is Access.PROXY and tier is not Tier.AUTO:
        raise OptionError(f"tier={tier} needs access=direct: a proxy does not distinguish the tiers")
    isolation = given.options.get("kafka.isolation.level", "read_uncommitted")
    if isolation not in ("read_uncommitted", "read_committed"):
        raise OptionError(f"kafka.isolation.level is read_committed or read_uncommitted, not {isolation!r}")
    include_headers, columns = column_options(options)
    return ReadOptions(
        subscription=subscription,
        starting=starting,
        ending=ending,
        tier=tier,
        access=access,
        config=config if access is Access.DIRECT else None,
        kafka=_kafka(given, config, access),
        is_committed_only=isolation == "read_committed",
        include_headers=include_headers,
        columns=columns,
        min_partitions=given.positive("minPartitions"),
        max_records_per_partition=given.positive("maxRecordsPerPartition"),
        max_offsets_per_trigger=greatest,
        min_offsets_per_trigger=smallest,
        max_trigger_delay_ms=_duration_ms(given.text("maxTriggerDelay") or "15m"),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        poll_timeout_ms=given.positive("kafkaConsumer.pollTimeoutMs") or TIMEOUT_MS,
        split_bytes=given.positive("splitBytes") or DEFAULT_SPLIT_BYTES,
        pushes_filters=given.flag("pushdown", False),
        parallelism=1 if given.has("splitBytes") else parallelism,
    )


class _Given:
    """The raw options by lower-case key."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = {key.lower(): value for key, value in options.items()}
        self._names = list(options)

    def check_names(self) -> None:
        for key, why in REFUSED.items():
            if key in self.options:
                raise OptionError(f"Kafka option '{key.removeprefix('kafka.')}' {why}")
        known = {name.lower(): name for name in (*_OPTIONS, *_OF_SPARK)} | _IGNORED
        for name in self._names:
            if name.lower() not in known:
                raise OptionError(f"unknown option {name}{did_you_mean(name, known.values())}")

    def has(self, name: str) -> bool:
        return name.lower() in self.options

    def text(self, name: str) -> str | None:
        return self.options.get(name.lower())

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in ("true", "false"):
            raise OptionError(f"{name} is true or false, not {text!r}")
        return text.strip().lower() == "true"

    def positive(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not text.strip().isdecimal() or int(text) == 0:
            raise OptionError(f"{name} must be positive, not {text!r}")
        return int(text)

    def choice(self, name: str, kind: type[E], default: E) -> E:
        text = self.text(name)
        if text is None:
            return default
        try:
            return kind(text.strip().lower())
        except ValueError:
            raise OptionError(f"{name} is {' or '.join(kind)}, not {text!r}") from None


def _subscription(given: _Given) -> Subscription:
    names = [name for name in _SUBSCRIPTIONS if given.has(name)]
    if len(names) != 1:
        what = "One of the following options must be specified" if not names else "Only one of these may be specified"
        raise OptionError(f"{what} for Kafka source: {', '.join(_SUBSCRIPTIONS)}")
    value = (given.text(names[0]) or "").strip()
    match names[0]:
        case "subscribe":
            topics = tuple(part.strip() for part in value.split(",") if part.strip())
            if not topics:
                raise OptionError(f"No topics to subscribe to as specified value for option 'subscribe' is '{value}'")
            return Subscription(topics=topics)
        case "subscribePattern":
            if not value:
                raise OptionError("Pattern to subscribe is empty as specified value for option 'subscribePattern'")
            try:
                re.compile(value)
            except re.error as error:
                raise OptionError(f"subscribePattern: {value!r} is not a regular expression: {error}") from None
            return Subscription(pattern=value)
        case _:
            return Subscription(assigned=_assigned(value))


def _assigned(text: str) -> tuple[TopicPartition, ...]:
    document = _json("assign", text)
    found: list[TopicPartition] = []
    for topic, numbers in document.items():
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise OptionError(f'assign: expected e.g. {{"topicA":[0,1],"topicB":[0,1]}}, not {text}')
        found += [(topic, number) for number in numbers]
    if not found:
        raise OptionError(f"No topicpartitions to assign as specified value for option 'assign' is '{text}'")
    return tuple(found)


def _position(given: _Given, which: Literal["starting", "ending"], default: int) -> Position:
    """Parses the position. The most specific option wins, as in Spark: timestamp, offsets by timestamp, offsets."""
    strategy = (given.text("startingOffsetsByTimestampStrategy") or "error").lower()
    if strategy not in ("error", "latest"):
        raise OptionError(f"startingOffsetsByTimestampStrategy is error or latest, not {strategy!r}")
    on_no_match: OnNoMatch = "latest" if strategy == "latest" or which == "ending" else "error"
    if (text := given.text(f"{which}Timestamp")) is not None:
        if not text.strip().isdecimal():
            raise OptionError(f"{which}Timestamp is a number of milliseconds, not {text!r}")
        return Position(int(text), is_time=True, on_no_match=on_no_match)
    if (text := given.text(f"{which}OffsetsByTimestamp")) is not None:
        times = _partition_numbers(f"{which}OffsetsByTimestamp", text, lowest=0)
        return Position(None, times, is_time=True, on_no_match=on_no_match)
    text = given.text(f"{which}Offsets")
    match (text or "").strip().lower():
        case "":
            return Position(default)
        case "earliest":
            return Position(EARLIEST)
        case "latest":
            return Position(LATEST)
    return Position(None, _partition_numbers(f"{which}Offsets", text or "", lowest=EARLIEST))


def _check_batch(given: _Given, starting: Position, ending: Position) -> None:
    if not starting.is_time:
        if starting.default == LATEST:
            raise OptionError("starting offset can't be latest for batch queries on Kafka")
        for partition, offset in starting.each.items():
            if offset == LATEST:
                raise OptionError(
                    f"startingOffsets for {name_of(partition)} can't be latest for batch queries on Kafka"
                )
    if not ending.is_time:
        if ending.default == EARLIEST:
            raise OptionError("ending offset can't be earliest for batch queries on Kafka")
        for partition, offset in ending.each.items():
            if offset == EARLIEST:
                raise OptionError(
                    f"ending offset for {name_of(partition)} can't be earliest for batch queries on Kafka"
                )
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"):
        if given.has(name):
            logger.warning("%s option ignored in batch queries", name)


def _partition_numbers(name: str, text: str, lowest: int) -> dict[TopicPartition, int]:
    """Parses `{"topic": {"0": 23, "1": -1}}`."""
    found: dict[TopicPartition, int] = {}
    for topic, numbers in _json(name, text).items():
        if not isinstance(numbers, dict):
            raise OptionError(f'{name}: expected e.g. {{"topicA":{{"0":23,"1":-1}}}}, not {text}')
        for partition, number in numbers.items():
            if not partition.isdecimal() or type(number) is not int or number < lowest:
                raise OptionError(f"{name}: {topic}-{partition}: {number!r}")
            found[topic, int(partition)] = number
    return found


def _json(name: str, text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise OptionError(f"{name}: expected a JSON object, not {text!r}")
    return document


def _kafka(given: _Given, config: PipelineConfig | None, access: Access) -> UpstreamConfig:
    """Returns the connection settings. Without `kafka.*` options for address or identity, a direct reader uses those of
    the file."""
    fallback = config.upstream if config is not None and access is Access.DIRECT else None
    try:
        return upstream_of_options(given.options, fallback)
    except ValueError as error:
        raise OptionError(str(error)) from None


_DURATION = re.compile(r"(\d+)\s*(ms|s|m|min|h|d)?")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, None: 1}


def _duration_ms(text: str) -> int:
    """Parses a duration like Spark's `timeStringAsMs`."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise OptionError(f"maxTriggerDelay: expected e.g. 15m, not {text!r}")
    return int(found[1]) * _UNIT_MS[found[2]]


def name_of(partition: TopicPartition) -> str:
    return f"{partition[0]}-{partition[1]}"
