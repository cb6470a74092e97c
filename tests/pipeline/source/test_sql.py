"""The topics that a query reads are checked before Spark starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from pipeline import cli
from pipeline.source.datasource import NAME as RECORDS
from pipeline.source.options import parse_options
from pipeline.source.segments_relation import NAME as SEGMENTS
from pipeline.source.sql import check_topics, options_of
from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tiers.broker.cluster_metadata import TopicMetadata

RECORDS_OF = "select * from tiered"
INTERNAL = "__remote_log_metadata"


def file_of(folder: Path, port: int = 1) -> Path:
    file = folder / "tidegate.toml"
    file.write_text(
        f'[upstream]\nbootstrap.servers = "127.0.0.1:{port}"\n[storage]\nimplementation = "local"\npath = "/no"\n'
    )
    return file


@pytest.fixture
async def config(tmp_path: Path) -> AsyncIterator[Path]:
    """The file of a cluster with the topics `orders` and `__remote_log_metadata`."""
    async with ScriptedBroker() as broker:
        partitions = {0: PartitionMetadata(0, 1, 0)}
        broker.topics = [TopicMetadata(name, uuid4(), partitions) for name in ("orders", INTERNAL)]
        yield file_of(tmp_path, broker.port)


@pytest.fixture
def starts_no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("pipeline.commands.sql.job_session", refused)


@pytest.mark.usefixtures("starts_no_spark")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topics", "ordrs", RECORDS_OF], "matches 'ordrs'; did you mean orders?\n"),
        (["--topics", "x.*", RECORDS_OF], "matches 'x.*'\n"),
        (["--option", "startingOffset=latest", RECORDS_OF], "option startingOffset; did you mean startingOffsets?\n"),
        (["--config", "nowhere.toml", "select 1"], "nowhere.toml: No such file or directory\n"),
    ],
)
async def test_a_query_of_no_topic_file_or_option_is_misuse(
    config: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [] if "--config" in arguments else ["--config", str(config)]
    assert await asyncio.to_thread(cli.run, ["sql", *where, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line.endswith(said)


@pytest.mark.parametrize("topics", ["orders", "__.*", None])
async def test_topics_that_match_are_read(config: Path, topics: str | None) -> None:
    await asyncio.to_thread(check_topics, RECORDS_OF, config, topics, {})


def test_internal_topics_are_read_only_when_they_are_named(tmp_path: Path) -> None:
    def chosen(topics: str | None) -> list[str]:
        options = parse_options(options_of(RECORDS, file_of(tmp_path), topics, {}), is_streaming=False)
        return options.subscription.topics_among(["orders", INTERNAL])

    assert chosen(None) == ["orders"]
    assert chosen("__.*") == [INTERNAL]


def test_an_option_may_name_the_topics() -> None:
    assert options_of(RECORDS, Path("x"), None, {"subscribe": "orders"}) == {"config": "x", "subscribe": "orders"}
    assert options_of(SEGMENTS, Path("x"), None, {}) == {"config": "x"}
