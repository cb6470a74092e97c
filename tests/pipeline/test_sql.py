"""`tidegate-pipeline sql` on a topic of both tiers."""

from __future__ import annotations

import base64
import json
import math
from decimal import Decimal

import pytest
from pyspark.sql import Row, SparkSession

from pipeline import cli
from pipeline.commands.sql import plain
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
        (["select struct(1 as a, 2 as a)"], "several columns or fields are named a: each needs an alias"),
        (["select array(map(1, struct(2 as b, 3 as b)))", "--json"], "several columns or fields are named b"),
        (
            ["select map(array(1), 2)"],
            "map<array<int>,int> has arrays or structs as keys: map_entries() makes an array",
        ),
        (["select struct(map(struct(array(1)), 2))", "--json"], "has arrays or structs as keys"),
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
        ("timestamp_micros(1700000000000000000)", "+55840-11-08 22:13:20", "+55840-11-08 22:13:20"),
        ("timestamp_ntz'-0044-03-15 12:00:00'", "-0044-03-15 12:00:00", "-0044-03-15 12:00:00"),
        ("date'+12000-01-01'", "+12000-01-01", "+12000-01-01"),
        ("array(date'+12000-01-01', null)", '["+12000-01-01", null]', ["+12000-01-01", None]),
        ("map(date'+12000-01-01', 1)", '{"+12000-01-01": 1}', {"+12000-01-01": 1}),
        ("named_struct('day', date'+12000-01-01')", '{"day": "+12000-01-01"}', {"day": "+12000-01-01"}),
        ("map_entries(map(array(1), 2))", '[{"key": [1], "value": 2}]', [{"key": [1], "value": 2}]),
        ("interval '1' month", "INTERVAL '1' MONTH", "INTERVAL '1' MONTH"),
    ],
)
def test_a_value_that_python_lacks_is_text(
    arguments: list[str], expression: str, text: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*arguments, f"select {expression} as `a.b`"]) == 0
    assert text in capsys.readouterr().out
    assert cli.run([*arguments, f"select {expression} as `a.b`", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"a.b": value}]


def test_columns_of_one_name_are_shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*arguments, "select 41 as a, 42 as a"]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["41", "42"]


def test_every_answer_of_spark_is_json() -> None:
    """Numbers that JSON lacks, and keys that are no text, too."""
    answer = Row(
        ratio=math.nan,
        price=Decimal("1.50"),
        counts={b"k": 1, 7: -math.inf},
        headers=[Row(key="h", value=bytearray(b"v"))],
        nothing=None,
    )
    assert json.loads(json.dumps(plain(answer), allow_nan=False)) == {
        "ratio": "nan",
        "price": "1.50",
        "counts": {"aw==": 1, "7": "-inf"},
        "headers": [{"key": "h", "value": "dg=="}],
        "nothing": None,
    }
