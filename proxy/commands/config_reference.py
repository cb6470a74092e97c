"""Generates the sections of `docs/configuration.md`, behind the mark `<!-- generated`, from the settings models."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from proxy.config import TidegateConfig
from proxy.process.live_settings import is_live
from tiers.config.setting_keys import key_of, keys_of_field, own_fields
from tiers.config.settings import DurationMs, SizeBytes

_TITLES = {
    "": "Top of the file",
    "storage.locations": "`[[storage.locations]]`",
    "topics": "`[[topics]]`",
}


def reference() -> str:
    return "".join(_section(name, model) for name, model in TidegateConfig.section_models().items())


def _section(name: str, model: type[BaseModel]) -> str:
    title = _TITLES.get(name, f"`[{name}]`")
    said = " ".join([*(model.__doc__ or "").split(), *_live(name, model)])
    lines = [f"\n## {title}\n", said, "", *_table(model)]
    if not name:
        lines += [_row(key, TidegateConfig.model_fields[key]) for key in TidegateConfig.keys_at_top()]
    return "\n".join(lines) + "\n"


def _live(name: str, model: type[BaseModel]) -> Iterator[str]:
    """Yields a sentence that says which keys of a section SIGHUP applies, if there are any."""
    if is_live(f"[[{name}]]"):
        yield "SIGHUP applies changes at once."
        return
    keys = [key_of(each, field) for each, field in own_fields(model).items()]
    live = [key for key in keys if is_live(f"[{name}] {key}" if name else key)]
    rest = [key for key in keys if key not in live]
    if len(rest) < len(live):
        yield f"SIGHUP applies changes at once, except those of {_listed(rest)}."
    elif live:
        yield f"SIGHUP applies changes of {_listed(live)} at once."


def _listed(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield "| Key | Default | Meaning |"
    yield "|---|---|---|"
    for name, field in own_fields(model).items():
        if name == "settings":
            yield f"| *others* | | {field.description} |"
        else:
            yield _row(name, field)


def _row(name: str, field: FieldInfo) -> str:
    key, *also = keys_of_field(name, field)
    meaning = f"{field.description}" + (f" Also: `{'`, `'.join(also)}`." if also else "")
    return f"| `{key}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "*required*" if field.is_required() else ""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value > 0:
        if field.metadata and _is(field, SizeBytes):
            return f"`{_largest(value, (('GiB', 1 << 30), ('MiB', 1 << 20), ('KiB', 1 << 10)))}`"
        if field.metadata and _is(field, DurationMs):
            return f"`{_largest(value, (('d', 86_400_000), ('h', 3_600_000), ('m', 60_000), ('s', 1_000)))}`"
        return f"`{value}`"
    return f"`{value}`" if isinstance(value, int | float) else f'`"{value}"`'


def _is(field: FieldInfo, annotated: object) -> bool:
    wanted = getattr(annotated, "__metadata__", ())
    return any(entry in wanted for entry in field.metadata)


def _largest(value: int, units: tuple[tuple[str, int], ...]) -> str:
    for unit, size in units:
        if value % size == 0:
            return f'"{value // size}{unit}"'
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(reference())
