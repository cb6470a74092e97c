"""docs/founding.md names only code and tests that exist, and the settings of the founding texts hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.proxy.parsed_config import parse_config
from tests.support.repository import ROOT
from tiers.config.settings import RemoteLogConfig

PAGE = (ROOT / "docs" / "founding.md").read_text()
COLUMNS = ["Name", "From", "The founding text", "Where", "Test", "Difference"]
TEXTS = {"KIP-405", "cache", "managers", "index files", "KIP-917"}
UPSTREAM = '[upstream]\nbootstrap.servers = "a:9092"\n'
STORAGE = '[storage]\nimplementation = "local"\npath = "/"\n'
PLACE = re.compile(r"`((?:protocol|tiers|proxy|bench|pipeline)/[\w/]+\.py)(?:::(\w+))?`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[dict[str, str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    headings, _, *entries = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert headings == COLUMNS
    return [dict(zip(headings, cells, strict=True)) for cells in entries]


@cache
def names(path: str) -> frozenset[str]:
    """The classes, functions and assigned names of a file, those of classes included."""

    def found() -> Iterator[str]:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield name
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield name

    return frozenset(found())


def without_known(cell: str, form: re.Pattern[str]) -> str:
    """Returns what is left of a cell without the places that exist and the commas between them."""

    def known(place: re.Match[str]) -> str:
        path, name = place.groups()
        exists = (ROOT / path).is_file() and (name is None or name in names(path))
        return "" if exists else place[0]

    return re.sub(r"^(?:, )*|(?:, )*$", "", form.sub(known, cell))


def test_every_row_names_code_that_exists() -> None:
    assert {row["Name"]: left for row in rows() if (left := without_known(row["Where"], PLACE))} == {}


def test_every_row_names_tests_that_exist() -> None:
    assert {row["Name"]: left for row in rows() if (left := without_known(row["Test"], TEST))} == {}


def test_every_row_says_where_and_by_which_test_or_why_not() -> None:
    incomplete = [row["Name"] for row in rows() if not (row["Where"] and row["Test"]) and not row["Difference"]]
    assert incomplete == []
    assert [row for row in rows() if not (row["Name"] and row["The founding text"])] == []


def test_every_row_has_a_name_of_its_own_and_a_text() -> None:
    found = [row["Name"] for row in rows()]
    assert len(found) == len(set(found))
    assert {text for row in rows() for text in row["From"].split(", ")} == TEXTS


@pytest.mark.parametrize(
    "cell",
    [
        "`tiers/nowhere.py`",
        "`tiers/tasks/hold.py::no_such_name`",
        "`tiers/tasks/hold.py`, `tiers/nowhere.py::name`, `tiers/tasks/hold.py`",
    ],
)
def test_a_place_that_does_not_exist_is_found(cell: str) -> None:
    assert without_known(cell, PLACE)


def test_the_founding_defaults_hold() -> None:
    settings = RemoteLogConfig()
    assert (settings.metadata_topic, settings.metadata_topic_partitions) == ("__remote_log_metadata", 50)
    assert settings.custom_metadata_max_bytes == 128


@pytest.mark.parametrize("name", ["remote.log.storage.enable", "remote.log.storage.system.enable"])
def test_the_switch_turns_the_remote_tier_off(name: str) -> None:
    assert parse_config(UPSTREAM + STORAGE).is_tiered
    assert parse_config(f"{name} = true\n{UPSTREAM}{STORAGE}").is_tiered
    assert not parse_config(f"{name} = false\n{UPSTREAM}{STORAGE}").is_tiered


@pytest.mark.parametrize("name", ["remote.log.manager.task.interval.ms", "rlm_process_interval_ms"])
def test_the_names_of_an_interval_are_one_setting(name: str) -> None:
    assert parse_config(f'{name} = "7s"\n{UPSTREAM}').remote_log.task_interval_ms == 7000
