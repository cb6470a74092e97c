"""`TierConfig`: the settings of the remote tier in the TOML file, and the functions that read the file.

Every program that uses the tier reads the same file. Its own sections are in a subclass. An error message has one line
per mistake in the file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from tiers.config.environment import Settings, overlaid
from tiers.config.setting_keys import keys_of_field, own_fields, sections_of
from tiers.config.settings import (
    METADATA_SETTINGS,
    TOPIC_BASED,
    CheckedModel,
    RemoteLogConfig,
    Section,
    StorageConfig,
    flatten,
    text_of,
)
from tiers.config.topic_policy import TopicConfig
from tiers.config.total_retention import BROKERS_KEYS, REPLACED_KEYS, TOTAL_KEYS
from tiers.config.upstream_config import UpstreamConfig
from tiers.segment.segment_encryption import KeyRing, read_key_file
from tiers.storage.locations import encode_location

STORAGE_PREFIX = "remote.log.storage."
METADATA_PREFIX = "remote.log.metadata."
"""A key that begins with one of these prefixes and is not Tidegate's own goes to the manager, without the prefix."""
STORAGE_MANAGER = "remote.log.storage.manager.class.name"
METADATA_MANAGER = "remote.log.metadata.manager.class.name"
_PLACE_KEYS = ("bucket", "prefix", "uri", "url", "path", "cluster.id")
"""The settings of stores that say where objects are, without secrets."""


class ConfigError(Exception):
    """The configuration is invalid. The message has one line per mistake."""


class StateConfig(Section):
    """The proxy's files on disk: caches, and the metadata that it has read.

    The proxy rebuilds them from the metadata topic. Never delete them while that topic is lost or damaged: then they
    may be the last copy. See 'The metadata topic is lost' in docs/recovery.md."""

    path: Path = Field(
        default=Path("tidegate-state"),
        description="The folder of this proxy's files. No other proxy may use it. The proxy creates a missing folder.",
    )


class EncryptionConfig(CheckedModel):
    """Encryption at rest: AES-256-GCM per chunk with one key per segment, which one of these keys wraps. Without
    `current`, new segments are not encrypted. Encrypted segments are read with the key that they name.
    """

    current: str | None = Field(
        default=None, min_length=1, description="The name, in `keys`, of the key for new segments."
    )
    keys: Mapping[str, Path] = Field(
        default_factory=dict,
        description=(
            'A name and a file for every key in use: `keys.k2026 = "/etc/tidegate/k2026"`. The file holds 32 bytes or '
            "their base64. Keep a key as long as any segment names it; without the key, the segment is lost."
        ),
    )

    @model_validator(mode="after")
    def _check_current(self) -> EncryptionConfig:
        if self.current is not None and self.current not in self.keys:
            raise ValueError(f"current: there is no key {self.current!r} in keys")
        return self

    def key_ring(self) -> KeyRing:
        """Reads the key files. Raises `ValueError`, which names the file to correct."""
        return KeyRing({key_id: read_key_file(path) for key_id, path in self.keys.items()}, self.current)


class TierConfig(CheckedModel):
    """The settings of the remote tier. Kafka's `remote.*` keys are at the top of the file, before the first section."""

    upstream: UpstreamConfig
    state: StateConfig = StateConfig()
    storage: StorageConfig | None = None
    encryption: EncryptionConfig = EncryptionConfig()
    topics: tuple[TopicConfig, ...] = ()
    remote_log: RemoteLogConfig = RemoteLogConfig()

    @model_validator(mode="before")
    @classmethod
    def _gather_remote_log(cls, values: Any) -> Any:
        known = {key: value for key, value in values.items() if key in cls.model_fields}
        rest = flatten({key: value for key, value in values.items() if key not in known})
        own, storage, implementation = cls.keys_of(""), known.get("storage"), rest.pop(STORAGE_MANAGER, None)
        if isinstance(storage, Mapping) or (storage is None and implementation is not None):
            settings = _taken(rest, STORAGE_PREFIX, own)
            if implementation is not None:
                settings["implementation"] = implementation
            known["storage"] = _merged(storage or {}, settings)
        metadata_manager = rest.get(METADATA_MANAGER, TOPIC_BASED)
        if isinstance(metadata_manager, str) and metadata_manager != TOPIC_BASED:
            rest[METADATA_SETTINGS] = {key: text_of(value) for key, value in _taken(rest, METADATA_PREFIX, own).items()}
        return {**known, "remote_log": rest}

    @model_validator(mode="after")
    def _check_together(self) -> TierConfig:
        if self.topics and self.storage is None and self.remote_log.enabled:
            raise ValueError("[[topics]] names topics to tier, but there is no [storage] to copy them to: add it")
        # Every copy would stop if the name of a location did not fit in the custom metadata.
        limit_bytes = self.remote_log.custom_metadata_max_bytes
        for location in () if self.storage is None else self.storage.locations:
            if location.weight and limit_bytes < (needed_bytes := len(encode_location(location.name, None))):
                raise ValueError(
                    f"remote.log.metadata.custom.metadata.max.bytes is {limit_bytes}, but the location "
                    f"{location.name!r} takes {needed_bytes} bytes of it: set it to at least {needed_bytes}"
                )
        return self

    @property
    def is_tiered(self) -> bool:
        """Whether there is a remote tier."""
        return self.storage is not None and self.remote_log.enabled

    def shared_digests(self) -> str:
        """Returns digests, without secrets, of the sections that all proxies of a cluster need the same.

        Values that are Tidegate's defaults do not count, so proxies of two releases have the same digest."""
        store, stores = self.storage, []
        if store is not None:
            locations = sorted(store.locations, key=lambda each: each.name)
            stores = [("", store.implementation, store.plain_settings())]
            stores += [(each.name, *store.place_of(each)) for each in locations]
        places = [
            (name, made_by, *(settings.get(key, "").rstrip("/") for key in _PLACE_KEYS))
            for name, made_by, settings in stores
        ]
        rules = [each.model_dump_json(exclude_defaults=True) for each in self.topics]
        return f"[storage]={_digest(places)} [[topics]]={_digest(rules)}"

    @classmethod
    def section_models(cls) -> Mapping[str, type[BaseModel]]:
        """Returns the models by section; "" is the top of the file."""
        found = sections_of(cls)
        return {"": found.pop("remote_log"), **found}

    @classmethod
    def settings_by_variable(cls) -> Settings:
        """Returns the settings by the environment variables that set them."""
        return Settings(cls.section_models(), cls)

    @classmethod
    def foreign_sections(cls) -> list[str]:
        """Returns the sections, and the keys at the top of the file, that only another program reads."""
        return []

    @classmethod
    def keys_at_top(cls) -> list[str]:
        """Returns the keys at the top of the file that are no keys of Kafka."""
        return list(own_fields(cls))

    @classmethod
    def keys_of(cls, section: str) -> list[str]:
        """Returns all names of the keys of a section, also the second names."""
        fields = own_fields(cls.section_models()[section]).items()
        names = [key for name, field in fields for key in keys_of_field(name, field) if not key.endswith("*")]
        return names if section else [*names, *cls.keys_at_top(), STORAGE_MANAGER]

    @classmethod
    def sections(cls) -> list[str]:
        """Returns the sections that are not part of another section."""
        return [section for section in cls.section_models() if section and "." not in section]


def _taken(values: dict[str, Any], prefix: str, own: Container[str]) -> dict[str, Any]:
    keys = [key for key in values if key.startswith(prefix) and key not in own]
    return {key.removeprefix(prefix): values.pop(key) for key in keys}


def _merged(section: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    known = flatten({key: value for key, value in section.items() if key != "locations"})
    for key, value in settings.items():
        if known.get(key, value) != value:
            name = STORAGE_MANAGER if key == "implementation" else f"{STORAGE_PREFIX}{key}"
            raise ValueError(f"{name} and [storage] {key} have different values: remove one of them")
    return {**section, **settings}


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


C = TypeVar("C", bound=TierConfig)


def load_config_file(path: Path, model: type[C]) -> C:
    """Reads and validates a file. Raises `ConfigError`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    name = "the environment" if str(path) == os.devnull else str(path)
    return parse_config_text(text, model, name, os.environ)


def parse_config_text(text: str, model: type[C], name: str, environ: Mapping[str, str] = MappingProxyType({})) -> C:
    """Validates TOML text; `name` is for the messages. The settings in `environ` take precedence.

    Raises `ConfigError`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {_explain_syntax(error, text)}") from None
    try:
        values, sources = overlaid(values, environ, model.settings_by_variable(), model.foreign_sections())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        return model.model_validate(values, by_alias=True, by_name=False)
    except ValidationError as error:
        mistakes = _explain(error, model, values)
        raise ConfigError("\n".join(f"{sources.get(place, name)}: {line}" for place, line in mistakes)) from None


def _explain_syntax(error: tomllib.TOMLDecodeError, text: str) -> str:
    """Names the key that is set twice. A line that is no whole setting is not shown: it may be part of a secret."""
    if "Cannot overwrite a value" not in str(error):
        return str(error)
    at = re.search(r"at line (\d+)", str(error))
    lines = text.split("\n")
    line = next(filter(str.strip, reversed(lines)), "") if at is None else lines[int(at[1]) - 1]
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        line = ""
    key = line.partition("=")[0].strip()
    plain = key.removesuffix(".file")
    if plain != key and any(each.partition("=")[0].strip() == plain for each in lines):
        twice = f"{key} and {plain} are both set: remove one of them"
    else:
        twice = f"{f'the key {key}' if key else 'a key'} is set twice, or is also the first part of another key"
    return str(error).replace("Cannot overwrite a value", twice)


def _explain(
    error: ValidationError, model: type[TierConfig], values: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yields the section and the key of each mistake, and what is wrong."""
    details = error.errors(include_url=False, include_context=False)
    for detail in details:
        if detail["type"] == "too_short" and any(_is_within(other["loc"], detail["loc"]) for other in details):
            continue  # an entry is invalid, which another line reports
        where = [str(part) for part in detail["loc"] if part != "remote_log"]
        place = section, key = _place(where, model)
        named = _quoted(section, key, _entries(detail["loc"], values))
        match detail["type"]:
            case "extra_forbidden" if other := _other_name(section, key, model):
                both = f"this is another name of {other}, which is set as well: remove one"
                yield place, f"{named}: {both}"
            case "extra_forbidden":
                yield place, f"unknown key {named}{_hint(section, key, model)}"
            case "missing":
                yield place, f"missing key {named}" if key else f"missing section [{section}]"
            case "tuple_type" if section and not key:
                yield place, f"[{section}] is a list: write [[{section}]] for each of its entries"
            case _:
                message = detail["msg"].removeprefix("Value error, ")
                value = detail["input"]
                is_shown = section == "topics" and key and isinstance(value, str | int | float)  # there are no secrets
                said = f" = {json.dumps(value)}" if is_shown else ""
                yield place, f"{named}{said}: {message}" if where else message


def _is_within(inner: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _place(where: list[str], model: type[TierConfig]) -> tuple[str, str]:
    if where and where[0] in model.section_models():
        section, *rest = [part for part in where if not part.isdecimal()]
        while rest and f"{section}.{rest[0]}" in model.section_models():
            section = f"{section}.{rest.pop(0)}"
        return section, ".".join(rest)
    return "", ".".join(where)


def _entries(where: Sequence[int | str], values: Any) -> dict[str, str]:
    """Names the entries of lists that have a mistake, by their sections, as `number 2 (pattern "orders-*")`.

    An entry that is the only one and has no name is left out."""
    found: dict[str, str] = {}
    for place, part in enumerate(where):
        is_one = isinstance(values, list) and len(values) == 1
        try:
            values = values[part]
        except (LookupError, TypeError):
            break
        if isinstance(part, int) and isinstance(values, Mapping):
            name = next(
                (f" ({key} {json.dumps(values[key], default=str)})" for key in ("name", "pattern") if key in values), ""
            )
            if name or not is_one:
                found[".".join(each for each in where[:place] if isinstance(each, str))] = f"number {part + 1}{name}"
    return found


def _quoted(section: str, key: str, entries: Mapping[str, str]) -> str:
    around = "".join(f"[[{name}]] {entry}: " for name, entry in entries.items() if name != section)
    if section in entries:
        return f"{around}[[{section}]] {entries[section]} {key}".strip()
    return f"{around}[{section}] {key}".strip() if section else f"{key}"


def _other_name(section: str, key: str, model: type[TierConfig]) -> str | None:
    """Returns the first name of the setting that has `key` as another name; None if there is no such setting.

    Pydantic reports a second name as unknown only when the file sets the first one too."""
    if section not in model.section_models():
        return None
    names = (keys_of_field(name, field) for name, field in own_fields(model.section_models()[section]).items())
    return next((first for first, *others in names if key in others), None)


def _hint(section: str, key: str, model: type[TierConfig]) -> str:
    """Returns a hint for an unknown key: its replacement, the nearest known key, or the section where it belongs."""
    if replacement := REPLACED_KEYS.get(key):
        return f"; use {replacement} in [[topics]] instead"
    if total := BROKERS_KEYS.get(key):
        return f"; it is a setting of the brokers. For a total retention over both tiers, use {total} in [[topics]]"
    if key in TOTAL_KEYS:
        return "; it belongs in [[topics]]"
    is_of_manager = not section and key.startswith(STORAGE_PREFIX)
    ending = f" A storage manager of which this is a setting needs {STORAGE_MANAGER}." if is_of_manager else ""
    if nearest := difflib.get_close_matches(key, model.keys_of(section), 1, 0.8):
        return f"; did you mean {nearest[0]}?{ending}"
    for other in ("", *model.sections()):
        known = model.keys_of(other)
        if key in known or (other and key.startswith(f"{other}.") and key.removeprefix(f"{other}.") in known):
            header = "[[topics]]" if other == "topics" else f"[{other}]"
            return f"; it belongs {f'in {header}' if other else 'at the top of the file'}"
    if not section and (nearest := difflib.get_close_matches(key.partition(".")[0], model.sections(), 1, 0.6)):
        return f"; did you mean [{nearest[0]}]?"
    return ""
