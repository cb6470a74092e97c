"""`tidegate init` writes a file that Tidegate reads, overwrites none, and checks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy import cli
from proxy.config import TidegateConfig, load_config

OPTIONS = [
    *("--bootstrap-servers", "127.0.0.1:1, kafka-2:9092"),
    *("--advertised-host", "tidegate.example.org"),
    *("--topics", "orders-*"),
    *("--no-check",),
]
S3 = ["--store", "s3", "--bucket", "log-segments"]


def advertising(host: str) -> list[str]:
    return [*OPTIONS[:3], host, *OPTIONS[4:], *S3]


def written(file: Path, *options: str) -> TidegateConfig:
    assert cli.run(["init", str(file), *OPTIONS, *options]) == 0
    return load_config(file)


def test_the_options_are_the_settings(tmp_path: Path) -> None:
    config = written(
        tmp_path / "a.toml",
        *S3,
        "--region",
        "eu-1",
        "--endpoint-url",
        "http://s3:7070",
        "--state",
        str(tmp_path / 'a "b"'),
    )
    assert [*map(tuple, config.upstream.bootstrap_servers)] == [("127.0.0.1", 1), ("kafka-2", 9092)]
    [listener] = config.listener
    assert (listener.advertised_host, listener.base_port) == ("tidegate.example.org", 9100)
    assert config.state.path == tmp_path / 'a "b"'
    [topic] = config.topics
    assert (topic.pattern, topic.local_retention_ms, topic.segment_ms) == ("orders-*", 6 * 3_600_000, 3_600_000)
    assert config.storage is not None
    assert config.storage.implementation == "s3"
    assert config.storage.plain_settings() == {
        "bucket": "log-segments",
        "region": "eu-1",
        "endpoint.url": "http://s3:7070",
        "path.style": "true",
    }


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--store", "local", "--path", "/tier"], {"path": "/tier"}),
        (["--store", "hdfs", "--url", "hdfs://nn:8020", "--path", "/t"], {"url": "hdfs://nn:8020", "path": "/t"}),
    ],
)
def test_other_stores(tmp_path: Path, options: list[str], settings: dict[str, str]) -> None:
    config = written(tmp_path / "a.toml", *options, "--local-retention", "360m")
    assert config.storage is not None
    assert config.storage.plain_settings() == settings
    assert config.topics[0].local_retention_ms == 21_600_000


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text("mine")
    assert cli.run(["init", str(file), *OPTIONS, *S3]) == 2
    assert (file.read_text(), "exists: name another file" in capsys.readouterr().err) == ("mine", True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--bootstrap-servers", "a:1", "--topics", "*"],
            "Missing option '--advertised-host'. See: tidegate init --help",
        ),
        ([*OPTIONS, *S3, "--local-retention", "6 moons"], "'6 moons': expected a number and one of the units"),
        ([*OPTIONS, *S3, "--local-retention", "7"], "for '--local-retention': '7': expected a number and one of the"),
        ([*OPTIONS, *S3, "--endpoint-url", "\udcff"], "can't decode byte 0xff"),
        (OPTIONS, "--store s3 needs --bucket"),
        ([*OPTIONS, *S3, "--url", "x", "--path", "/x"], "--store s3 takes no --url or --path"),
        ([*OPTIONS, "--store", "hdfs"], "--store hdfs needs --url and --path"),
        ([*OPTIONS, "--store", "tape"], "for '--store': 'tape' is not one of"),
        (advertising("http://tide:9092"), "[listener] advertised.host: 'http://tide:9092' is not a host name"),
        (advertising("10.0.0.300"), "'10.0.0.300' is not a host name or an IP address"),
    ],
)
def test_a_wrong_option_is_one_line_and_leaves_no_file(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    assert cli.run(["init", str(file), *options]) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines()), file.exists()) == ("", 1, False)
    assert said in captured.err


def test_a_problem_that_the_check_finds_leaves_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No broker listens at the port, and the store's folder is missing."""
    file = tmp_path / "a.toml"
    options = [*OPTIONS[:-1], "--store", "local", "--path", str(tmp_path / "none"), "--state", str(tmp_path / "state")]
    options[1] = "127.0.0.1:1"
    assert cli.run(["init", str(file), *options]) == 1
    captured = capsys.readouterr()
    assert "problem: [upstream] no broker answers at 127.0.0.1:1" in captured.out
    assert f"Correct {file}, and run: tidegate check --config {file}" in captured.err
    assert load_config(file).state.path == tmp_path / "state"


@pytest.mark.parametrize("address", ["tide_gate", "fd00::1", "kafka-{id}.example.org"])
def test_names_and_addresses_can_be_advertised(address: str, tmp_path: Path) -> None:
    assert cli.run(["init", str(tmp_path / "a.toml"), *advertising(address)]) == 0
    assert load_config(tmp_path / "a.toml").listener[0].advertised_host == address
