"""The effective settings of a proxy, each with its source. Secrets are redacted. Pure.

Tidegate knows which of its own keys hold a secret. A manager of a third party declares none, so all of its values are
redacted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from proxy.admin.facts import SettingLine, SettingSource, SettingsPage
from proxy.config import TidegateConfig
from tiers.config.environment import PREFIX
from tiers.config.setting_keys import is_one_or_more, is_table, key_of, keys_of_field, own_fields
from tiers.config.settings import StorageConfig, StorageLocationConfig

REDACTED: Final = "••••••"
_SECRET_WORD: Final = re.compile(r"secret|password|passphrase|token|credential|key|sas|account|connection", re.I)
_USER_IN_URL: Final = re.compile(r"(?<=://)\S*@")
"""Up to the last @, because a password may have one, or a slash."""
_QUERY_OF_URL: Final = re.compile(r"(?<=://)([^\s?]*)\?\S*")
_OWN_STORES: Final = frozenset({"local", "s3", "hdfs", "arrow"})


def settings_page(config: TidegateConfig, environ: Collection[str] = ()) -> SettingsPage:
    """`environ` has the names of the environment variables with which the process began."""
    variables = frozenset(name for name in environ if name.startswith(PREFIX))
    return SettingsPage(tuple(_lines(config, variables)))


def _lines(config: TidegateConfig, variables: frozenset[str]) -> Iterator[SettingLine]:
    for name in TidegateConfig.keys_at_top():
        field = TidegateConfig.model_fields[name]
        yield _line("", (), name, field, getattr(config, name), name in config.model_fields_set, variables)
    yield from _section("", (), config.remote_log, variables, is_known=False)
    for section in TidegateConfig.section_models():
        if section:
            for path, model in _models_of(config, section):
                yield from _section(section, path, model, variables, is_known=_is_own_store(config, model))


def _is_own_store(config: TidegateConfig, model: BaseModel) -> bool:
    """Whether a storage manager of Tidegate declares the keys of the section."""
    if not isinstance(model, StorageConfig | StorageLocationConfig) or config.storage is None:
        return False
    return (model.implementation or config.storage.implementation) in _OWN_STORES


def _models_of(config: TidegateConfig, section: str) -> Iterator[tuple[tuple[str, ...], BaseModel]]:
    """Yields the models of a section, each with its place. A list has several, a section that is missing has none."""
    found: list[tuple[tuple[str, ...], Any]] = [((), config)]
    for part in section.split("."):
        below: list[tuple[tuple[str, ...], Any]] = []
        for path, model in found:
            value = getattr(model, part, None)
            if isinstance(value, tuple):
                below += [((*path, part, str(number)), each) for number, each in enumerate(value)]
            elif value is not None:
                below.append(((*path, part), value))
        found = below
    yield from ((path, model) for path, model in found if isinstance(model, BaseModel))


def _section(
    section: str, path: tuple[str, ...], model: BaseModel, variables: frozenset[str], *, is_known: bool
) -> Iterator[SettingLine]:
    """`is_known`: whether only the names of the manager's keys tell its secrets."""
    title = _title(section, path)
    for name, field in own_fields(type(model)).items():
        value = getattr(model, name)
        if is_table(field):
            prefix = "" if name == "settings" else f"{key_of(name, field).removesuffix('.*')}."
            yield from _table(title, path, prefix, value, variables, is_known=is_known)
        else:
            yield _line(title, path, name, field, value, name in model.model_fields_set, variables)


def _title(section: str, path: tuple[str, ...]) -> str:
    number = next((part for part in reversed(path) if part.isdecimal()), None)
    return section if number is None else f"{section} {int(number) + 1}"


def _line(
    section: str,
    path: tuple[str, ...],
    name: str,
    field: FieldInfo,
    value: object,
    is_set: bool,
    variables: frozenset[str],
) -> SettingLine:
    keys = keys_of_field(name, field)
    names = [_variable((*each, end)) for key in keys for end in (key, f"{key}.file") for each in _forms(path)]
    used = next((each for each in names if each in variables), None)
    source: SettingSource = "environment" if used else "file" if is_set else "default"
    return SettingLine(
        section,
        key_of(name, field),
        _text(value),
        source,
        used or names[0],
        " ".join((field.description or "").split()),
    )


def _table(
    section: str,
    path: tuple[str, ...],
    prefix: str,
    values: Mapping[str, object],
    variables: frozenset[str],
    *,
    is_known: bool,
) -> Iterator[SettingLine]:
    """Yields the settings of a manager. Those that are no `SecretStr` are never a secret."""
    for key, value in values.items():
        variable = _variable((*path, f"{prefix}{key}"))
        source: SettingSource = "environment" if variable in variables else "file"
        yield SettingLine(section, f"{prefix}{key}", _shown(key, value, is_known=is_known), source, variable, "")


def _shown(key: str, value: object, *, is_known: bool) -> str:
    if not isinstance(value, SecretStr):
        return str(value)
    is_file = key.endswith(".file")
    if not is_file and (not is_known or _SECRET_WORD.search(key) is not None):
        return REDACTED
    return without_secrets(value.get_secret_value())


def without_secrets(url: str) -> str:
    """Returns a URL without its user and its query, and any other text as it is."""
    return _QUERY_OF_URL.sub(r"\1", _USER_IN_URL.sub("", url))


def _forms(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the path of a section as variables may name it: the first entry of some lists needs no number."""
    yield path
    if path[1:2] == ("0",) and is_one_or_more(TidegateConfig.model_fields[path[0]]):
        yield (path[0], *path[2:])


def _variable(path: Collection[str]) -> str:
    return PREFIX + "__".join(part.replace(".", "_") for part in path).upper()


def _text(value: object) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, SecretStr):
        return REDACTED
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
        return f"{value[0]}:{value[1]}"
    if isinstance(value, tuple | list | frozenset):
        return ", ".join(_text(each) for each in value)
    return str(value)
