"""Settings from environment variables, which override those of the file.

`TIDEGATE__UPSTREAM__BOOTSTRAP_SERVERS` sets `bootstrap.servers` in `[upstream]`. Two underscores begin each part: the
sections, and then the key, in capitals, with one underscore for each dot. The entries of a list such as `[[topics]]`
have numbers from 0 on, as in `TIDEGATE__TOPICS__0__NAME`. A value has the form that it has in the file. Text needs no
quotes.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tiers.config.setting_keys import file_keys, is_list, is_one_or_more, is_table, is_text, keys_of_field, section_of

PREFIX = "TIDEGATE__"
_OPEN_KEYS = {"": "remote.log.", "storage": "", "storage.locations": "", "encryption": "keys."}
"""By section: how the keys begin that a manager declares, or that the user chooses."""


class Setting(NamedTuple):
    """A setting: its section, which is empty at the top of the file, and its key. `is_text`: its values are text."""

    section: str
    key: str
    is_text: bool


class Settings:
    """The settings of the sections, by the parts of the variables that set them."""

    def __init__(self, sections: Mapping[str, type[BaseModel]], file: type[BaseModel]) -> None:
        """`file` has the sections, and the settings at the top of the file that no model of `sections` has."""
        self._known: dict[tuple[str, ...], Setting] = {}
        self.lists: dict[tuple[str, ...], bool] = {}
        """The sections that are lists. True: without a number, a variable is about the first entry."""
        for section, model in sections.items():
            path = tuple(section.split(".")) if section else ()
            keys = dict.fromkeys(file_keys(model), True)
            for of in (model,) if section else (model, file):
                for name, field in of.model_fields.items():
                    if section_of(field) is None:
                        keys |= dict.fromkeys(_keys(name, field), is_text(field))
                    elif is_list(field):
                        self.lists[*path, name] = is_one_or_more(field)
            for key, is_of_text in keys.items():
                self._known[*path, key.replace(".", "_")] = Setting(section, key, is_of_text)

    def variables(self) -> dict[str, Setting]:
        """Returns every setting by its variable, without the numbers of entries."""
        return {_variable(path): setting for path, setting in self._known.items()}

    def meant(self, name: str) -> str | None:
        """Returns the variable that `name` would be with the right number of underscores. None: there is none."""
        return next((each for each in self.variables() if _one_underscore(each) == _one_underscore(name)), None)

    def named(self, given: tuple[str, ...]) -> Setting:
        """Returns the setting of a variable's parts. Raises `ValueError`."""
        path = tuple(part for part in given if not part.isdecimal())
        if path in self._known:
            return self._known[path]
        *section_path, key = path
        section = ".".join(section_path)
        open_key = key.replace("_", ".")
        if section in _OPEN_KEYS and open_key.startswith(_OPEN_KEYS[section]):
            return Setting(section, open_key, is_text=True)
        names = {"__".join(known): known for known in self._known}
        nearest = difflib.get_close_matches("__".join(path), names, 1, 0.75)
        hint = f"; did you mean {_variable(self._with_numbers(names[nearest[0]], given))}?" if nearest else ""
        raise ValueError(f"there is no such setting{hint}")

    def _with_numbers(self, known: tuple[str, ...], given: tuple[str, ...]) -> Iterator[str]:
        """Yields the parts of a variable, with the numbers of `given` behind the lists."""
        numbers = (part for part in given if part.isdecimal())
        for end, part in enumerate(known, 1):
            yield part
            if known[:end] in self.lists:
                yield from filter(None, [next(numbers, "" if self.lists[known[:end]] else "0")])


def overlaid(
    values: Mapping[str, Any], environ: Mapping[str, str], settings: Settings, foreign: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
    """Returns the values of a file with those of the environment in their places, and the variables by section and key.

    `foreign` are the sections that only another program reads. Raises `ValueError`, whose message has one line for each
    variable that does not fit."""
    result, sources, mistakes = deepcopy(dict(values)), {}, []
    paths = {name: tuple(name.removeprefix(PREFIX).lower().split("__")) for name in environ if name.startswith(PREFIX)}
    for name, path in sorted(paths.items(), key=lambda item: [(part.isdecimal(), part.zfill(9)) for part in item[1]]):
        if path[0] in foreign:
            continue
        try:
            setting = settings.named(path)
            value = environ[name] if setting.is_text else _parsed(environ[name])
            node = _section(result, path[:-1], settings.lists)
            *parents, last = setting.key.split(".")
            for part in parents:
                node = _table(node, part)
            node[last] = value
        except ValueError as error:
            mistakes.append(f"{name}: {error}")
        else:
            sources[setting.section, setting.key] = name
    for name, value in environ.items():
        # For a Service that is called `tidegate-admin`, Kubernetes sets TIDEGATE_ADMIN_PORT to an address.
        is_like_ours = name.startswith(PREFIX[:-1]) and not name.startswith(PREFIX) and "://" not in value
        meant = settings.meant(name) if is_like_ours else None
        if meant is not None:
            mistakes.append(f"{name}: there is no such setting; did you mean {meant}?")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return result, sources


def _keys(name: str, field: FieldInfo) -> list[str]:
    """Returns no key of a table, whose keys are those of a manager, or the user's own."""
    return [] if is_table(field) else keys_of_field(name, field)


def _one_underscore(name: str) -> str:
    return re.sub("_+", "_", name)


def _variable(path: Iterable[str]) -> str:
    return PREFIX + "__".join(path).upper()


def _parsed(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _section(values: dict[str, Any], path: tuple[str, ...], lists: Mapping[tuple[str, ...], bool]) -> dict[str, Any]:
    """Returns the table of a section, or of an entry of a list, and creates what is missing."""
    node: dict[str, Any] = values
    within: tuple[str, ...] = ()
    parts = deque(path)
    while parts:
        part = parts.popleft()
        within = (*within, part)
        if within not in lists:
            node = _table(node, part)
            continue
        is_numbered = bool(parts) and parts[0].isdecimal()
        if not is_numbered and not lists[within]:
            example = _variable((*within, "0", "key"))
            raise ValueError(f"[[{'.'.join(within)}]] is a list: name an entry, as in {example}")
        number = int(parts.popleft()) if is_numbered else 0
        entries = node.setdefault(part, [])
        if isinstance(entries, dict):
            entries = node[part] = [entries]
        if number > len(entries):
            raise ValueError(f"entry {number} would leave a hole: there are only {len(entries)} before it")
        if number == len(entries):
            entries.append({})
        node = entries[number]
    return node


def _table(node: dict[str, Any], key: str) -> dict[str, Any]:
    table = node.setdefault(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"the file has a value for {key}, where this variable needs a table")
    return table
