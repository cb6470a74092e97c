"""`tidegate-pipeline sql` on a topic of both tiers."""

from __future__ import annotations

import base64
import json

import pytest
from pyspark.sql import SparkSession

from pipeline import cli
from tests.support.pipeline.read_stage import ReadStage


@pytest.fixture
def arguments(spark: SparkSession, stage: ReadStage) -> list[str]:
    """The commands of this process run in the session that there is."""
    return ["sql", "--config", str(stage.proxy.config), "--topics", stage.topic]


def test_one_query_counts_both_tiers(
    arguments: list[str], stage: ReadStage, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "select partition, count(*) as records, min(offset) as first from tiered group by 1 order by 1"
    assert cli.run([*arguments, query, "--json"]) == 0
    expected = [
        {"partition": number, "records": len(rows), "first": rows[0]["offset"]}
        for number in (0, 1)
        if (rows := stage.expected(partition=number))
    ]
    assert json.loads(capsys.readouterr().out) == expected


def test_bytes_are_shown_as_text_and_given_to_programs_as_base64(
    arguments: list[str], stage: ReadStage, capsys: pytest.CaptureFixture[str]
) -> None:
    offset, key = next((row["offset"], row["key"]) for row in stage.expected(partition=0) if row["key"])
    query = f"select key, timestamp from tiered where partition = 0 and offset = {offset}"
    assert cli.run([*arguments, query]) == 0
    assert f" {key.decode()} " in capsys.readouterr().out
    assert cli.run([*arguments, query, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert base64.b64decode(row["key"]) == key


def test_no_more_rows_than_asked_for_and_it_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    query = "select start_offset from tiered_segments order by start_offset"
    assert cli.run([*arguments, query, "--rows", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 2
    assert captured.err == "there are more than these 2 rows: --rows shows more\n"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["selec 1"], "PARSE_SYNTAX_ERROR"),
        (["select count(*) from tiered", "--option", "startingOffset=earliest"], "did you mean startingOffsets?"),
        (["select 1 as a, 2 as a", "--json"], "several columns are named a: each needs an alias"),
        (
            ["select struct(map(array(1), 2))", "--json"],
            "a map has keys of the type array: map_entries() makes an array",
        ),
    ],
)
def test_a_wrong_query_is_one_line(
    arguments: list[str], more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*arguments, *more]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("expression", "text", "value"),
    [
        ("timestamp_micros(1700000000000000000)", "+55840-11-08 22:13:20", "+55840-11-08T22:13:20.000Z"),
        ("date'+12000-01-01'", "+12000-01-01", "+12000-01-01"),
        ("array(date'+12000-01-01', null)", "[+12000-01-01, null]", ["+12000-01-01", None]),
        ("map(7, 1)", "{7 -> 1}", {"7": 1}),
        ("named_struct('h', x'76', 'n', null)", "{v, null}", {"h": "dg==", "n": None}),
        ("map_entries(map(array(1), 2))", "[{[1], 2}]", [{"key": [1], "value": 2}]),
        ("interval '1' month", "INTERVAL '1' MONTH", "INTERVAL '1' MONTH"),
        ("double('nan')", "NaN", "NaN"),
        ("x'00'", "0x00", "AA=="),
    ],
)
def test_a_value_of_any_type_is_shown(
    arguments: list[str], expression: str, text: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*arguments, f"select {expression} as `a.b`"]) == 0
    assert text in capsys.readouterr().out
    assert cli.run([*arguments, f"select {expression} as `a.b`", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"a.b": value}]


def test_columns_of_one_name_are_shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*arguments, "select 41 as a, 42 as a"]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["41", "42"]
