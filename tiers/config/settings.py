"""The validated settings of the remote log, and the base class of all sections of the file.

If a KIP names a key, that name is used verbatim, including its dots. Durations are milliseconds and sizes are bytes, or
both are strings with a unit ("10s", "7d", "64MiB"). An unknown key is an error that names the nearest known key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from string import ascii_letters, digits
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tiers.config.setting_keys import file_keys, inner_keys, kinds_of
from tiers.metadata.topic.metadata_topic import DEFAULT_PARTITION_COUNT, DEFAULT_TOPIC_NAME, MetadataTopicSettings
from tiers.quota import DEFAULT_WINDOW_NUM, DEFAULT_WINDOW_SIZE_MS, QuotaWindow
from tiers.storage.settings import DURATION, SIZE, read_secret

MIB = 1024 * 1024
DEFAULT_COPIER_THREADS: Final = 10
DEFAULT_VISIBLE_AFTER_MS: Final = 10_000

_LEGAL: Final = f"{ascii_letters}{digits}._-"
_MAX_LENGTH: Final = 249
_PARTS: Final = re.compile(r"\[!?\]?[^]]*]|.", re.DOTALL)
"""A set of characters as `fnmatch` reads it, or one character."""


def _duration(value: object) -> object:
    return DURATION.number(value) if isinstance(value, str) else value


def _size(value: object) -> object:
    return SIZE.number(value) if isinstance(value, str) else value


DurationMs = Annotated[int, BeforeValidator(_duration)]
SizeBytes = Annotated[int, BeforeValidator(_size)]
PositiveMs = Annotated[DurationMs, Field(gt=0)]
PositiveBytes = Annotated[SizeBytes, Field(gt=0)]


def check_pattern(value: str) -> str:
    """Raises `ValueError` if no topic can have a name that matches."""
    parts = _PARTS.findall(value)
    is_possible = all(any(fnmatchcase(each, part) for each in _LEGAL) for part in parts)
    is_too_long = len(parts) - parts.count("*") > _MAX_LENGTH
    if not is_possible or is_too_long or value in ("", ".", ".."):
        raise ValueError(
            f"{value!r} matches no topic: a topic name has letters, digits, '.', '_' and '-', and a pattern also has"
            " *, ?, [abc] and [!abc]"
        )
    return value


TopicPattern = Annotated[str, AfterValidator(check_pattern)]


class CheckedModel(BaseModel):
    """The base class of the models of the file. A boolean is no number, although Python would read it as 0 or 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_boolean(cls, value: object, info: ValidationInfo) -> object:
        kinds = set(kinds_of(cls.model_fields[info.field_name].annotation)) if info.field_name else set()
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("expected a number, not a boolean")
        return value


def _key(field: str) -> str:
    return field.replace("_", ".")


class Section(CheckedModel):
    """One section of the file, and the settings of the components that it configures.

    The file names a setting by its key, and code by its field. The key is the field's name with dots, unless the field
    has another alias. TOML parses `a.b = 1` as nested tables, which this class flattens again."""

    model_config = ConfigDict(
        validate_by_name=True, validate_by_alias=True, alias_generator=AliasGenerator(validation_alias=_key)
    )

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        whole = {key: value for key, value in values.items() if key in inner_keys(cls)}
        flat = flatten({key: value for key, value in values.items() if key not in whole})
        for file_key, key in file_keys(cls).items():
            if file_key in flat:
                if key in flat:
                    raise ValueError(f"{key} and {file_key} are both set: remove one of them")
                flat[key] = read_secret(file_key, flat.pop(file_key))
        return {**flat, **whole}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


TOPIC_BASED = "topic_based"
METADATA_SETTINGS = "remote.log.metadata.*"


class RemoteLogConfig(Section):
    """These keys are at the top of the file. Most of them are Kafka's own."""

    enabled: bool = Field(
        default=True,
        validation_alias=AliasChoices("remote.log.storage.system.enable", "remote.log.storage.enable"),
        description=(
            "The master switch. If it is false, all requests pass through, and the proxy neither copies to the remote "
            "tier nor serves from it."
        ),
    )
    task_interval_ms: PositiveMs = Field(
        default=30_000,
        validation_alias=AliasChoices("remote.log.manager.task.interval.ms", "rlm_process_interval_ms"),
        description="How often the owner runs the copy, trim and expiration tasks of each partition.",
    )
    task_retry_backoff_ms: PositiveMs = Field(
        default=1_000,
        validation_alias=AliasChoices("remote.log.manager.task.retry.backoff.ms", "rlm_retry_interval_ms"),
        description="How long the owner waits before it retries a failed task.",
    )
    manager_threads: PositiveInt | None = Field(
        default=None,
        validation_alias="remote.log.manager.thread.pool.size",
        description=(
            "The number of partitions whose tasks run at the same time. Rounds (which survey a partition and move its "
            "log start), trims and deletions have this number of places each, so a store that hangs in one kind of "
            "task does not hold up the others. By default the number of partitions that are copied at the same time."
        ),
    )
    copier_threads: PositiveInt | None = Field(
        default=None,
        validation_alias="remote.log.manager.copier.thread.pool.size",
        description=(
            "The number of partitions that are copied at the same time; by default "
            "`remote.log.manager.thread.pool.size`, or 10 without it. As many more may copy records that a broker "
            "removes soon. The owner processes a partition whose copying is off or stopped without one of these places."
        ),
    )
    copy_max_bytes_per_second: PositiveBytes | None = Field(
        default=None,
        validation_alias="remote.log.manager.copy.max.bytes.per.second",
        description="The copy quota of this process (KIP-956). By default there is no limit.",
    )
    copy_quota_window_num: PositiveInt = Field(
        default=DEFAULT_WINDOW_NUM,
        validation_alias="remote.log.manager.copy.quota.window.num",
        description="The number of samples in the window of the copy quota.",
    )
    copy_quota_window_size_seconds: PositiveInt = Field(
        default=DEFAULT_WINDOW_SIZE_MS // 1_000,
        validation_alias="remote.log.manager.copy.quota.window.size.seconds",
        description="The length of each sample of the copy quota.",
    )
    fetch_max_bytes_per_second: PositiveBytes | None = Field(
        default=None,
        validation_alias="remote.log.manager.fetch.max.bytes.per.second",
        description=(
            "The quota for all reads of clients from the remote tier (KIP-956). While it is exceeded, the proxy "
            "answers remote partitions empty. By default there is no limit."
        ),
    )
    fetch_quota_window_num: PositiveInt = Field(
        default=DEFAULT_WINDOW_NUM,
        validation_alias="remote.log.manager.fetch.quota.window.num",
        description="The number of samples in the window of the fetch quotas.",
    )
    fetch_quota_window_size_seconds: PositiveInt = Field(
        default=DEFAULT_WINDOW_SIZE_MS // 1_000,
        validation_alias="remote.log.manager.fetch.quota.window.size.seconds",
        description="The length of each sample of the fetch quotas.",
    )
    delete_attempts: PositiveInt = Field(
        default=5,
        validation_alias="remote.log.delete.publish.after.attempts",
        description=(
            "The number of failed attempts to delete a segment after which the owner publishes it to "
            "`__delete_failed_remote_log_segments`. The owner keeps retrying, with growing pauses."
        ),
    )
    deleted_segment_retention_ms: DurationMs = Field(
        default=86_400_000,
        validation_alias="remote.log.deleted.segment.retention.ms",
        ge=10_000,
        description=(
            "How long the metadata keeps a deleted segment. Then the owner deletes its objects once more, since a "
            "write of a process that was paused may arrive after the deletion. A copy gives up after half of this time."
        ),
    )
    topic_deletion_delay_ms: PositiveMs = Field(
        default=300_000,
        validation_alias="remote.log.topic.deletion.delay.ms",
        description=(
            "How long all brokers must report a topic as unknown before the owner deletes its segments. The deletion "
            "of the topic must also be proved: by its DeleteTopics request, if that came through a proxy, or by an "
            "operator's command."
        ),
    )
    reader_threads: PositiveInt = Field(
        default=20,
        validation_alias="remote.log.reader.threads",
        description=("The number of concurrent downloads from the remote tier. Together they have at most 128 MiB."),
    )
    reader_max_pending_tasks: PositiveInt = Field(
        default=100,
        validation_alias="remote.log.reader.max.pending.tasks",
        description="The number of downloads that may wait until one of them can start.",
    )
    fetch_max_wait_ms: PositiveMs = Field(
        default=5_000,
        validation_alias="remote.fetch.max.wait.ms",
        description=(
            "How long a read from the remote tier may take, if the max wait of the fetch is shorter. The fetch itself "
            "waits for the read at most 500 ms beyond its max wait. Then the client gets an empty answer, and its next "
            "fetch finds the read in progress."
        ),
    )
    custom_metadata_max_bytes: SizeBytes = Field(
        default=128,
        validation_alias="remote.log.metadata.custom.metadata.max.bytes",
        ge=0,
        lt=1 << 31,
        description="The maximum size of the custom metadata of a segment (KIP-917). 0 allows none but an empty one.",
    )
    index_file_cache_bytes: SizeBytes = Field(
        default=1024 * MIB,
        validation_alias="remote.log.index.file.cache.total.size.bytes",
        ge=0,
        description=(
            "The size of the segment indexes in files under `state.path`: those of segments that this proxy copied, "
            "and those that were read from the store. They survive a restart. With workers, the former have half of "
            "the size, and the latter the other half. 0 turns them off."
        ),
    )
    chunk_cache_bytes: PositiveBytes = Field(
        default=768 * MIB,
        validation_alias="remote.log.chunk.cache.total.size.bytes",
        description="The size of the cache of record data in memory.",
    )
    chunk_file_cache_bytes: SizeBytes = Field(
        default=0,
        validation_alias="remote.log.chunk.file.cache.total.size.bytes",
        ge=0,
        description=(
            "The size of the cache of record data in files under `state.path`. The data of encrypted segments stays "
            "encrypted. The cache survives a restart, and evicts the data of deleted segments when it needs the room. "
            "0 turns it off."
        ),
    )
    metadata_topic: str = Field(
        default=DEFAULT_TOPIC_NAME,
        validation_alias="remote.log.metadata.topic.name",
        min_length=1,
        description="The topic that holds the metadata of every segment.",
    )
    metadata_topic_partitions: PositiveInt = Field(
        default=DEFAULT_PARTITION_COUNT,
        validation_alias="remote.log.metadata.topic.num.partitions",
        description="The number of partitions with which the proxy creates the metadata topic.",
    )
    metadata_topic_replication_factor: PositiveInt | None = Field(
        default=None,
        validation_alias="remote.log.metadata.topic.replication.factor",
        description=(
            "The replication factor with which the proxy creates the metadata topic; by default 3, or the number of "
            "brokers if there are fewer."
        ),
    )
    metadata_manager: str = Field(
        default=TOPIC_BASED,
        validation_alias="remote.log.metadata.manager.class.name",
        min_length=1,
        description=(
            "The metadata manager: an entry point of the group `tidegate.remote_log_metadata_manager`, or "
            "`module:Class`. See `docs/storage.md`."
        ),
    )
    metadata_settings: Mapping[str, SecretStr] = Field(
        default_factory=dict,
        validation_alias=METADATA_SETTINGS,
        description=(
            "All other keys with this prefix go to the metadata manager, without the prefix. The topic-based one has "
            "none."
        ),
    )
    visible_after_ms: PositiveMs = Field(
        default=DEFAULT_VISIBLE_AFTER_MS,
        validation_alias="remote.log.visible.after.ms",
        description=(
            "How long a copied segment must be visible before the owner may trim the broker's copy (T_vis). A value "
            "below the default must be the same in all proxies. So stop all proxies before you change it from or to "
            "such a value."
        ),
    )

    @property
    def fresh_within_ms(self) -> int:
        """The greatest age of metadata that is fresh (docs/design.md, safety rule 1).

        It never exceeds half of the default T_vis: the owner may be another process, whose T_vis is shorter than the
        one here while an operator changes the setting."""
        return min(self.visible_after_ms, DEFAULT_VISIBLE_AFTER_MS) // 2

    @property
    def manager_pool_size(self) -> int:
        """The number of partitions that are processed at the same time."""
        return self.manager_threads or self.copier_pool_size

    @property
    def copier_pool_size(self) -> int:
        """The number of partitions that are copied at the same time."""
        return self.copier_threads or self.manager_threads or DEFAULT_COPIER_THREADS

    @property
    def is_topic_based(self) -> bool:
        """Whether the metadata is in the metadata topic."""
        return self.metadata_manager == TOPIC_BASED

    def plain_metadata_settings(self) -> dict[str, str]:
        """Returns the settings with secrets in plain text. Only for the constructor of the metadata manager."""
        return {key: value.get_secret_value() for key, value in self.metadata_settings.items()}

    @property
    def copy_quota_window(self) -> QuotaWindow:
        return QuotaWindow(self.copy_quota_window_num, self.copy_quota_window_size_seconds * 1000)

    @property
    def fetch_quota_window(self) -> QuotaWindow:
        return QuotaWindow(self.fetch_quota_window_num, self.fetch_quota_window_size_seconds * 1000)

    @property
    def metadata_topic_settings(self) -> MetadataTopicSettings:
        return MetadataTopicSettings(
            self.metadata_topic, self.metadata_topic_partitions, self.metadata_topic_replication_factor
        )


class _StoreSettings(CheckedModel):
    """A section whose keys go to a storage manager, except for a few keys of its own."""

    settings: Mapping[str, SecretStr] = Field(default_factory=dict, description="The keys of the storage manager.")

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        flat = flatten(values)
        own = {key: flat.pop(key) for key in cls.model_fields if key != "settings" and key in flat}
        return {**own, "settings": {key: text_of(value) for key, value in flat.items()}}

    def plain_settings(self) -> dict[str, str]:
        """Returns the settings with secrets in plain text. Only for the constructor of the storage manager."""
        return {key: value.get_secret_value() for key, value in self.settings.items()}


class StorageLocationConfig(_StoreSettings):
    """Another bucket, prefix or store for segments. There may be any number of `[[storage.locations]]`. The location of
    each segment is recorded in its metadata. So you may add locations and change their weights at any time, and remove
    a location that holds no segments. See `docs/storage.md`."""

    name: str = Field(
        min_length=1, description="The name of the location. It is recorded with every segment, so never change it."
    )
    weight: int = Field(
        default=1,
        ge=0,
        description="The location's share of new segments. With 0 it takes none; its segments stay until they expire.",
    )
    topics: TopicPattern = Field(
        default="*",
        description="A shell pattern: the location only takes new segments of topics that match.",
    )
    implementation: str = Field(
        default="",
        description="Another implementation than that of `[storage]`, whose settings then do not apply here.",
    )


class StorageConfig(_StoreSettings):
    """The store. Every key except `implementation` goes to the storage manager unchanged; see `docs/storage.md`. At the
    top of the file, `remote.log.storage.manager.class.name` stands for `implementation`, and `remote.log.storage.KEY`
    for every other key, unless that is a key of the table above.
    """

    implementation: str = Field(
        min_length=1,
        description=(
            "An entry point of the group `tidegate.remote_storage_manager`: `local`, `s3`, `hdfs`, `arrow`; or "
            "`module:Class`. Also, at the top of the file: `remote.log.storage.manager.class.name`."
        ),
    )
    locations: tuple[StorageLocationConfig, ...] = ()

    def place_of(self, location: StorageLocationConfig) -> tuple[str, dict[str, str]]:
        """Returns the implementation and the settings of a location, with secrets in plain text."""
        if location.implementation:
            return location.implementation, location.plain_settings()
        return self.implementation, self.plain_settings() | location.plain_settings()


def text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
