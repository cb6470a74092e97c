"""A mistake of a user gives one line and an exit code, and no traceback."""

from __future__ import annotations

import fcntl
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

from proxy import cli
from proxy.commands.check import Report
from proxy.commands.tier import topics
from proxy.config import load_config
from proxy.process.remote_log import metadata_folder
from tests.support.servers.ports import free_ports
from tiers.access.open_tier import RemoteTierError
from tiers.commands.console import FAILED, FINDINGS, INTERRUPTED, MISUSED
from tiers.metadata.state.layout import LOCK_FILE

NOBODY = f"""
[upstream]
bootstrap.servers = "127.0.0.1:1"
[admin]
port = 0
[listener]
advertised.host = "localhost"
bootstrap.port = {free_ports(1)[0]}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tidegate.toml"
    path.write_text(NOBODY)
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "there is no configuration: name a file with --config or TIDEGATE_CONFIG"),
        (["serve", "--config", "/nowhere/x.toml"], "/nowhere/x.toml: No such file or directory"),
        (["serve", "--confg", "x"], "(Possible options: --config). See: tidegate serve --help"),
        (["tier", "segments"], "Missing argument 'TOPIC[:PARTITION]'. See: tidegate tier segments --help"),
        (["sevre"], "No such command 'sevre'"),
        (["tier", "sevre"], "No such command 'sevre'"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("words", [["check"], ["tier", "delete-missing"]])
def test_the_configuration_is_found_without_the_option(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable names a file, else the working folder has one, else other variables are all there is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGATE__LOG__LEVEL", "loud")
    assert cli.run(words) == 2
    assert "the environment: missing section [upstream]" in capsys.readouterr().err
    (tmp_path / "tidegate.toml").write_text("x = 1")
    assert cli.run(words) == 2
    assert "tidegate.toml: unknown key x" in capsys.readouterr().err
    monkeypatch.setenv("TIDEGATE_CONFIG", str(tmp_path / "other.toml"))
    assert cli.run(words) == 2
    assert capsys.readouterr().err == f"tidegate: {tmp_path}/other.toml: No such file or directory\n"


@pytest.mark.parametrize("words", [(), ("serve",), ("tier",), ("tier", "rebuild")], ids=" ".join)
def test_each_command_refuses_an_option_that_is_given_twice(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, "--help", "--help"]) == 2
    said = f"--help is given more than once. See: {' '.join(('tidegate', *words))} --help"
    assert capsys.readouterr().err == f"tidegate: {said}\n"


@pytest.mark.parametrize(
    ("arguments", "command"), [([], "serve"), (["tier"], "rebuild"), (["tier", "metadata"], "export")]
)
def test_without_a_command_the_help_is_printed(
    arguments: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage: tidegate")
    assert f"  {command} " in captured.out
    assert captured.err == ""


def test_a_shell_completes_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_TIDEGATE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "tidegate ser")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit, match="0"):
        cli.run([])
    assert capsys.readouterr().out.strip() == "serve"


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_the_version_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 0
    assert capsys.readouterr().out.strip() == version("tidegate")


def test_brackets_in_an_error_are_printed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(f'{NOBODY}[[topics]]\nname = "a"\n')
    assert cli.run(["check", "--config", str(config)]) == 2
    assert "[[topics]] names topics to tier, but there is no [storage]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "lines"),
    [
        ("[listener] bootstrap.port", "[listener]\nhost = '127.0.0.1'\nbootstrap.port = {}\n[admin]\nport = 0\n"),
        ("[admin] port", "[admin]\nport = {}\n"),
        (
            "[listener] bootstrap.port",
            "[listener]\nhost = '127.0.0.1'\nbootstrap.port = {}\n[admin]\nport = 0\n"
            "[storage]\nimplementation = 'local'\npath = '{}'\n[state]\npath = '{}'\n",
        ),
    ],
)
def test_a_port_that_is_taken_is_a_failure(
    setting: str, lines: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config.write_text(
            NOBODY.partition("[admin]")[0] + lines.format(port, config.parent / "tier", config.parent / "state")
        )
        assert cli.run(["serve", "--config", str(config)]) == FAILED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tidegate: ")]
    assert line == f"tidegate: {setting}: 127.0.0.1:{port}: Address already in use"


def test_the_help_of_tier_cuts_no_description(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cli.run(["tier", "--help"])
    commands = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert [line for line in commands if line.endswith("...")] == []
    assert len(commands) > 10


@pytest.mark.parametrize("command", ["explain nosuch", "tier bounds nosuch", "top"])
def test_every_command_that_fails_ends_with_the_same_code(
    command: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = f"[storage]\nimplementation = 'local'\npath = '{config.parent}'\n"
    config.write_text(f"{NOBODY.replace('port = 0', 'port = 1')}{storage}")
    assert cli.run([*command.split(), "--config", str(config)]) == FAILED
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_command_that_is_interrupted_says_nothing(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "checked", interrupted)
    assert cli.run(["check", "--config", str(config)]) == INTERRUPTED


def test_check_says_that_no_broker_answers(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", "--config", str(config)]) == 1
    captured = capsys.readouterr()
    assert "problem: [upstream] no broker answers at 127.0.0.1:1" in captured.out
    assert captured.out.splitlines()[-1] == "1 problem"
    assert captured.err == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("[storage]\nimplementation = 'tape'\n", "[storage] tape: no remote storage manager is called 'tape'"),
        ("[storage]\nimplementation = 'local'\npth = 'x'\n", "[storage] local: unknown setting 'pth' of the local"),
        (
            "[storage]\nimplementation = 's3'\nbucket = 'b'\nsecret.access.key.file = '/nowhere/s'\n",
            "[storage] s3: setting 'secret.access.key.file': /nowhere/s: No such file or directory",
        ),
        (
            "[encryption]\ncurrent = 'k'\nkeys.k = '/nowhere/k'\n[storage]\nimplementation = 'local'\npath = '/'\n",
            "[encryption] /nowhere/k: No such file or directory",
        ),
        (
            "[state]\npath = '/tier/'\n[storage]\nimplementation = 'local'\npath = '/tier'\n",
            "[state] path: /tier is the folder of [storage]: change one of them",
        ),
        ("[upstream.tls]\nca = '/nowhere/ca'\n", "[upstream.tls] ca: /nowhere/ca: No such file or directory"),
        ("[listener.tls]\ncertificate = '/nowhere/c'\n", "[listener.tls] certificate: /nowhere/c: No such file"),
    ],
)
def test_check_and_serve_agree_on_a_mistake_in_the_settings(
    settings: str, said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"{NOBODY}{settings}")
    assert cli.run(["check", "--config", str(config)]) == MISUSED
    assert f"problem: {said}" in capsys.readouterr().out
    assert cli.run(["serve", "--config", str(config)]) == MISUSED
    assert capsys.readouterr().err.startswith(f"tidegate: {said}")


def test_a_state_folder_that_is_none_is_a_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = f"[state]\npath = '{config}/state'\n"
    config.write_text(f"{NOBODY}{state}[storage]\nimplementation = 'local'\npath = '{config.parent}'\n")
    assert cli.run(["check", "--config", str(config)]) == FINDINGS
    assert f"problem: [state] path: {config} is not a folder: change `path`" in capsys.readouterr().out


def test_a_state_folder_that_another_proxy_uses_is_a_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config.parent / "state" / "metadata"
    folder.mkdir(parents=True)
    storage = f"[storage]\nimplementation = 'local'\npath = '{config.parent}'\n"
    config.write_text(f"{NOBODY}[state]\npath = '{folder.parent}'\n{storage}")
    said = f"problem: [state] path: another proxy uses {folder.parent}: each proxy needs a folder of its own"
    with (folder / LOCK_FILE).open("ab") as lock:
        assert cli.run(["check", "--config", str(config)]) == FINDINGS
        assert said not in capsys.readouterr().out
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.run(["check", "--config", str(config)]) == FINDINGS
        assert said in capsys.readouterr().out


def test_check_creates_no_state_folder(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = config.parent / "new" / "state"
    storage = f"[storage]\nimplementation = 'local'\npath = '{config.parent}'\n"
    config.write_text(f"{NOBODY}[state]\npath = '{state}'\n{storage}")
    assert cli.run(["check", "--config", str(config)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 problem"
    assert not state.parent.exists()


def test_check_and_serve_agree_on_a_folder_that_cannot_be_written(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No user may create a file in /proc, though its mode allows that to root."""
    storage = f"[storage]\nimplementation = 'local'\npath = '{config.parent}'\n"
    config.write_text(f"{NOBODY}[state]\npath = '/proc/tidegate'\n{storage}")
    assert cli.run(["check", "--config", str(config)]) == 1
    assert "problem: [state] path: /proc cannot be written: " in capsys.readouterr().out
    with pytest.raises(RemoteTierError, match=r"\[state\] path: /proc/tidegate/metadata cannot be created: "):
        metadata_folder(load_config(config))


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_metadata_manager_that_is_not_installed_is_misuse(
    command: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = "remote.log.metadata.manager.class.name"
    config.write_text(f"{manager} = 'floppy'\n{NOBODY}[storage]\nimplementation = 'local'\npath = '/'\n")
    assert cli.run([command, "--config", str(config)]) == MISUSED
    assert f"{manager}: no remote log metadata manager is called 'floppy'; installed are" in "".join(
        capsys.readouterr()
    )


def test_the_last_line_of_a_report_counts_problems_and_warnings() -> None:
    def last_line(report: Report) -> str:
        return list(report.lines())[-1]

    assert last_line(Report(cluster_id="c", store="s3")) == "no problems"
    assert last_line(Report(warnings=["old"], rules=["warning: matches no topic"])) == "no problems, 2 warnings"
    assert last_line(Report(problems=["no broker"], warnings=["old"])) == "1 problem, 1 warning"


def test_a_file_that_cannot_be_read_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(work: object) -> None:
        Path("/nowhere/notes").read_bytes()

    monkeypatch.setattr(topics, "run_command", missing)
    assert cli.run(["tier", "topics", "--config", str(config)]) == 3
    assert capsys.readouterr().err == "tidegate: /nowhere/notes: No such file or directory\n"


def test_the_settings_of_topics_have_lines_of_their_own(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(NOBODY)
    settings = {
        "retention.ms": topics.Setting("604800000", "broker"),
        "local.retention.ms": topics.Setting("3600000", "file"),
        "remote.log.copy.disable": topics.Setting("false", "default"),
    }
    orders = topics.TieredTopic("orders", "id", 1, 2, 4096, None, None, None, None, (), settings, True, False)
    monkeypatch.setattr(topics, "run_command", lambda work: [orders])
    assert cli.run(["tier", "topics", "--config", str(config)]) == 0
    without = capsys.readouterr().out
    assert "retention" not in without
    assert cli.run(["tier", "topics", "--settings", "--config", str(config)]) == 0
    said = capsys.readouterr().out.removeprefix(without)
    assert [line.split() for line in said.splitlines() if "orders" in line] == [
        ["orders", "retention.ms", "604800000", "broker"],
        ["orders", "local.retention.ms", "3600000", "file"],
    ]
