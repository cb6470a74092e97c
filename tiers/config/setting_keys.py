"""The keys that the fields of a section have in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, Mapping) else value


ONE_OR_MORE: Final = BeforeValidator(_as_list)
"""Marks a list of sections that may be written as one section: `[name]` instead of `[[name]]`."""

_TEXT = (str, SecretStr, Path, NoneType)
_UNIONS = (Union, UnionType)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the model of a section, or of a list of sections. None: the field is no section."""
    kinds = (kind for kind in kinds_of(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next(kinds, None)


def sections_of(model: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Returns the models of all sections of the model, by their names in the file."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        if (inner := section_of(field)) is not None:
            found |= {f"{prefix}{name}": inner, **sections_of(inner, f"{prefix}{name}.")}
    return found


@cache
def inner_keys(model: type[BaseModel]) -> frozenset[str]:
    """Returns the keys of the model whose values are not flattened: the presence of an empty section matters."""
    fields = model.model_fields.items()
    return frozenset(key_of(name, field) for name, field in fields if section_of(field) or is_table(field))


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields of the model that are no sections."""
    return {name: field for name, field in model.model_fields.items() if section_of(field) is None}


def key_of(name: str, field: FieldInfo) -> str:
    """Returns the key in the file for a field; of several keys the first."""
    return keys_of_field(name, field)[0]


def keys_of_field(name: str, field: FieldInfo) -> list[str]:
    """Returns all keys in the file for a field."""
    alias = field.validation_alias
    return [str(key) for key in alias.choices] if isinstance(alias, AliasChoices) else [str(alias or name)]


def file_keys(model: type[BaseModel]) -> dict[str, str]:
    """Returns the keys of the model's secrets, by the keys with which the file names a file that has the secret."""
    fields = own_fields(model).items()
    secrets = [key_of(name, field) for name, field in fields if SecretStr in kinds_of(field.annotation)]
    return {f"{key}.file": key for key in secrets}


def is_text(field: FieldInfo) -> bool:
    """Returns whether every value of the field is text in the file."""
    return all(kind in _TEXT for kind in kinds_of(field.annotation))


def is_table(field: FieldInfo) -> bool:
    """Returns whether the keys below the field are those of a manager, or the user's own."""
    return get_origin(field.annotation) is Mapping


def is_list(field: FieldInfo) -> bool:
    return any(get_origin(kind) is tuple for kind in (field.annotation, *get_args(field.annotation)))


def is_one_or_more(field: FieldInfo) -> bool:
    return ONE_OR_MORE in field.metadata


def kinds_of(annotation: Any) -> Iterator[object]:
    """Yields the types that an annotation names, except those of a mapping's entries."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif not get_args(annotation) or get_origin(annotation) is Mapping:
        yield get_origin(annotation) or annotation
    else:
        if get_origin(annotation) not in _UNIONS:
            yield get_origin(annotation)
        for argument in get_args(annotation):
            yield from kinds_of(argument)
