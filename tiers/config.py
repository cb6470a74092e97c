"""The settings of the remote log, validated; and how every section of the file is read.

Where a KIP names a key it is used verbatim, dots included. Durations and sizes are numbers of milliseconds and bytes,
or strings with a unit ("10s", "7d", "64MiB"). Unknown keys are errors that name the nearest known one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from tiers.segment.segment_encryption import KeyRing, read_key_file

MIB = 1024 * 1024

_DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE_UNITS: Final = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def _with_unit(value: object, units: Mapping[str, int], example: str) -> object:
    if not isinstance(value, str):
        return value
    matched = _QUANTITY.fullmatch(value)
    if matched is None or matched[2] not in units:
        raise ValueError(f"expected a number or a string like {example!r}, with one of the units {', '.join(units)}")
    return int(float(matched[1]) * units[matched[2]])


def _duration(value: object) -> object:
    return _with_unit(value, _DURATION_UNITS_MS, "10s")


def _size(value: object) -> object:
    return _with_unit(value, _SIZE_UNITS, "64MiB")


DurationMs = Annotated[int, BeforeValidator(_duration)]
SizeBytes = Annotated[int, BeforeValidator(_size)]


class Section(BaseModel):
    """One section of the file; keys may hold dots. TOML reads `a.b = 1` as nested tables: they are flattened again."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=False, hide_input_in_errors=True)

    subsections: ClassVar[frozenset[str]] = frozenset()
    """Fields that are sections of their own: that one is there says something, even if it is empty."""

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        whole = {key: value for key, value in values.items() if key in cls.subsections}
        return {**flatten({key: value for key, value in values.items() if key not in whole}), **whole}

    @classmethod
    def defaults(cls) -> Self:
        return cls.model_validate({})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` is `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class RemoteLogConfig(Section):
    """Kafka's own keys, at the top of the file."""

    enabled: bool = Field(
        True,
        alias="remote.log.storage.system.enable",
        validation_alias=AliasChoices("remote.log.storage.system.enable", "remote.log.storage.enable"),
        description="The master switch. False: everything passes through, nothing is copied or served from the tier.",
    )
    task_interval_ms: DurationMs = Field(
        30_000,
        alias="remote.log.manager.task.interval.ms",
        validation_alias=AliasChoices("remote.log.manager.task.interval.ms", "rlm_process_interval_ms"),
        gt=0,
        description="How often every partition is looked at for what to copy, trim and expire.",
    )
    task_retry_backoff_ms: DurationMs = Field(
        1_000,
        alias="remote.log.manager.task.retry.backoff.ms",
        validation_alias=AliasChoices("remote.log.manager.task.retry.backoff.ms", "rlm_retry_interval_ms"),
        gt=0,
        description="How long a failed task waits before it is tried again.",
    )
    copier_threads: int = Field(
        10, alias="remote.log.manager.copier.thread.pool.size", gt=0, description="Partitions copied at the same time."
    )
    copy_max_bytes_per_second: SizeBytes | None = Field(
        None,
        alias="remote.log.manager.copy.max.bytes.per.second",
        gt=0,
        description="What all copying of this process may move (KIP-956); without it there is no limit.",
    )
    copy_quota_window_num: int = Field(
        11, alias="remote.log.manager.copy.quota.window.num", gt=0, description="Samples that the copy quota keeps."
    )
    copy_quota_window_size_seconds: int = Field(
        1, alias="remote.log.manager.copy.quota.window.size.seconds", gt=0, description="How long each sample is."
    )
    fetch_max_bytes_per_second: SizeBytes | None = Field(
        None,
        alias="remote.log.manager.fetch.max.bytes.per.second",
        gt=0,
        description=(
            "What clients may read from the remote tier, all together (KIP-956); a partition above it is answered "
            "empty. Without it there is no limit. Workers share it equally."
        ),
    )
    fetch_quota_window_num: int = Field(
        11, alias="remote.log.manager.fetch.quota.window.num", gt=0, description="Samples that fetch quotas keep."
    )
    fetch_quota_window_size_seconds: int = Field(
        1, alias="remote.log.manager.fetch.quota.window.size.seconds", gt=0, description="How long each sample is."
    )
    delete_attempts: int = Field(
        5,
        alias="remote.log.delete.publish.after.attempts",
        gt=0,
        description=(
            "After how many attempts a segment that the store does not delete is published to "
            "`__delete_failed_remote_log_segments`; it is tried further, ever more rarely."
        ),
    )
    topic_deletion_delay_ms: DurationMs = Field(
        300_000,
        alias="remote.log.topic.deletion.delay.ms",
        gt=0,
        description=(
            "How long no broker must have known a topic any more, before its segments are deleted. That it was deleted"
            " must be proved: by its DeleteTopics request, if that came through a proxy, or by an operator's word."
        ),
    )
    topic_deletion_unproved_delay_ms: DurationMs = Field(
        7 * 86_400_000,
        alias="remote.log.topic.deletion.unproved.delay.ms",
        gt=0,
        description=(
            "The same for a topic whose deletion is not proved. Of several that are missing since about the same time"
            " nothing is deleted without an operator: see 'Topics that are missing' in docs/operations.md."
        ),
    )
    reader_threads: int = Field(
        10, alias="remote.log.reader.threads", gt=0, description="Downloads from the remote tier at the same time."
    )
    reader_max_pending_tasks: int = Field(
        100, alias="remote.log.reader.max.pending.tasks", gt=0, description="Downloads that may wait for a reader."
    )
    fetch_max_wait_ms: DurationMs = Field(
        5_000,
        alias="remote.fetch.max.wait.ms",
        gt=0,
        description="How long a fetch of remote partitions alone may wait for them, if its own wait is shorter.",
    )
    list_offsets_timeout_ms: DurationMs = Field(
        15_000,
        alias="remote.list.offsets.request.timeout.ms",
        gt=0,
        description="The deadline of a look-up by timestamp in the remote tier.",
    )
    custom_metadata_max_bytes: SizeBytes = Field(
        128,
        alias="remote.log.metadata.custom.metadata.max.bytes",
        gt=0,
        description="What a storage manager may keep with a segment (KIP-917).",
    )
    index_cache_bytes: SizeBytes = Field(
        64 * MIB, alias="remote.log.index.cache.total.size.bytes", gt=0, description="Segment indexes kept in memory."
    )
    index_file_cache_bytes: SizeBytes = Field(
        1024 * MIB,
        alias="remote.log.index.file.cache.total.size.bytes",
        ge=0,
        description="Segment indexes kept in files under `state.path`, so that a restart need not fetch them; 0: none.",
    )
    index_file_roll_bytes: SizeBytes = Field(
        MIB,
        alias="remote.log.index.file.roll.bytes",
        gt=0,
        lt=1 << 30,
        description="Size at which a partition's remoteLogIndex gets a successor.",
    )
    index_file_roll_ms: DurationMs = Field(
        3_600_000,
        alias="remote.log.index.file.roll.ms",
        gt=0,
        description="Age at which a partition's remoteLogIndex gets a successor.",
    )
    chunk_cache_bytes: SizeBytes = Field(
        256 * MIB, alias="remote.log.chunk.cache.total.size.bytes", gt=0, description="Record data kept in memory."
    )
    chunk_file_cache_bytes: SizeBytes = Field(
        0,
        alias="remote.log.chunk.file.cache.total.size.bytes",
        ge=0,
        description=(
            "Record data kept in files under `state.path`, as the store has it: encrypted segments stay encrypted. It "
            "outlives a restart, and what was deleted leaves it when its room is needed. Workers share it equally; 0: "
            "none."
        ),
    )
    reader_hedge_max_percent: int = Field(
        5,
        alias="remote.log.reader.hedge.max.percent",
        ge=0,
        le=50,
        description=(
            "How many of a hundred reads of record data may be sent to the store a second time when they take longer "
            "than almost all others; 0: none."
        ),
    )
    reader_max_bytes_in_flight: SizeBytes = Field(
        128 * MIB,
        alias="remote.log.reader.max.bytes.in.flight",
        gt=0,
        description="What all downloads under way may take together.",
    )
    read_ahead_bytes: SizeBytes = Field(
        128 * MIB,
        alias="remote.log.reader.read.ahead.max.bytes",
        gt=0,
        description="What may be downloaded before a client has asked for it.",
    )
    metadata_topic: str = Field(
        "__remote_log_metadata",
        alias="remote.log.metadata.topic.name",
        min_length=1,
        description="The topic that holds the metadata of every segment.",
    )
    metadata_topic_partitions: int = Field(
        50, alias="remote.log.metadata.topic.num.partitions", gt=0, description="Used when the topic is created."
    )
    metadata_topic_replication_factor: int | None = Field(
        None,
        alias="remote.log.metadata.topic.replication.factor",
        gt=0,
        description="Used when the topic is created; by default 3, or one per broker when there are fewer.",
    )
    visible_after_ms: DurationMs = Field(
        10_000,
        alias="remote.log.visible.after.ms",
        gt=0,
        description="How long a copied segment must have been visible before the broker's copy may be removed (T_vis).",
    )


class TopicConfig(Section):
    """Which topics are tiered: as many `[[topics]]` as you like; the first that matches a topic decides."""

    pattern: str = Field(
        validation_alias=AliasChoices("name", "pattern"),
        serialization_alias="name",
        min_length=1,
        description="A topic's name, or a shell pattern like `orders-*` (then the key may be written `pattern`).",
    )
    remote_storage_enable: bool = Field(True, alias="remote.storage.enable", description="Whether to tier the topic.")
    local_retention_ms: DurationMs = Field(
        -2,
        alias="local.retention.ms",
        ge=-2,
        description="How long the broker keeps what was copied; -2: as long as retention.ms.",
    )
    local_retention_bytes: SizeBytes = Field(
        -2,
        alias="local.retention.bytes",
        ge=-2,
        description="How much of a partition the broker keeps of what was copied; -2: retention.bytes.",
    )
    segment_bytes: SizeBytes = Field(
        64 * MIB, alias="segment.bytes", gt=0, lt=1 << 31, description="Size of a remote segment."
    )
    segment_ms: DurationMs = Field(
        3_600_000, alias="segment.ms", gt=0, description="Age at which a segment is copied though it is not full."
    )
    fetch_max_bytes_per_second: SizeBytes | None = Field(
        None,
        alias="remote.fetch.max.bytes.per.second",
        gt=0,
        description="What all clients together may read of each such topic's remote tier. Workers share it equally.",
    )
    copy_disable: bool = Field(
        False, alias="remote.log.copy.disable", description="Stops copying; what was copied stays readable (KIP-950)."
    )


class _StoreSettings(BaseModel):
    """A section whose keys go to a storage manager, but for a few of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    settings: Mapping[str, SecretStr] = Field(default_factory=dict, description="The storage manager's own keys.")

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        flat = flatten(values)
        own = {key: flat.pop(key) for key in cls.model_fields if key != "settings" and key in flat}
        return {**own, "settings": {key: _text(value) for key, value in flat.items()}}

    def plain_settings(self) -> dict[str, str]:
        """For the storage manager's constructor alone: secrets in the clear."""
        return {key: value.get_secret_value() for key, value in self.settings.items()}


class StorageLocationConfig(_StoreSettings):
    """Another bucket, prefix or store: as many `[[storage.locations]]` as you like. Each segment's is kept with its
    metadata, so any may be added and its weight be changed; one may go when no segment lies there. See
    `docs/storage.md`."""

    name: str = Field(min_length=1, description="Kept with every segment that lies there: never change it.")
    weight: int = Field(1, ge=0, description="Its share of new segments. 0: what lies there is read and expires.")
    topics: str = Field("*", min_length=1, description="New segments of these topics alone; a shell pattern.")
    implementation: str = Field(
        "", description="Of another kind than `[storage]`: then none of the settings there count here."
    )


class StorageConfig(_StoreSettings):
    """The store. Every key but `implementation` goes to the storage manager as it is; see `docs/storage.md`."""

    subsections: ClassVar[frozenset[str]] = frozenset({"locations"})

    implementation: str = Field(
        min_length=1,
        description="An entry point of the group `tidegate.remote_storage_manager`: `local`, `s3`, `hdfs`, `arrow`.",
    )
    locations: tuple[StorageLocationConfig, ...] = ()

    def place_of(self, location: StorageLocationConfig) -> tuple[str, dict[str, str]]:
        """The implementation and the settings of a location; secrets in the clear."""
        if location.implementation:
            return location.implementation, location.plain_settings()
        return self.implementation, self.plain_settings() | location.plain_settings()


class EncryptionConfig(BaseModel):
    """Encryption at rest: AES-256-GCM per chunk, by a key of the segment's own that one of these keys wraps. Without
    `current`, new segments are not encrypted; what was encrypted is read with the key that it names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    current: str | None = Field(
        default=None, min_length=1, description="The key for new segments, by its name in `keys`."
    )
    keys: Mapping[str, Path] = Field(
        default_factory=dict,
        description=(
            'A name and a file for every key in use: `keys.k2026 = "/etc/tidegate/k2026"`, 32 bytes or their base64. '
            "Keep a key as long as any segment names it; without it the segment is lost."
        ),
    )

    @model_validator(mode="after")
    def _check_current(self) -> EncryptionConfig:
        if self.current is not None and self.current not in self.keys:
            raise ValueError(f"current: there is no key {self.current!r} in keys")
        return self

    def key_ring(self) -> KeyRing:
        """Reads the files. Raises `ValueError` that names the one to mend."""
        return KeyRing({key_id: read_key_file(path) for key_id, path in self.keys.items()}, self.current)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
