"""A mistake of a user gives one line and an exit code, and no traceback."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import socket
import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from proxy import cli
from proxy.__main__ import main
from proxy.admin.facts import TopicSetting
from proxy.commands.tier import topics
from proxy.config import load_config
from proxy.process.remote_log import metadata_folder
from tests.support.servers.ports import free_ports
from tiers.access.open_tier import RemoteTierError
from tiers.commands.console import FAILED, FINDINGS, MISUSED
from tiers.commands.program import INTERRUPTED
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
        (["tier", "segments"], "Missing argument 'TOPIC[:PARTITION]'. See: tidegate tier segments --help"),
        (["tier", "sevre"], "No such command 'sevre'"),
        (
            ["tier", "--config", "x"],
            "No such option: --config. Options follow the name of a command. See: tidegate tier",
        ),
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


def test_a_closed_pipe_ends_a_command_with_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reader(text: str) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    for name in ("stdout", "stderr"):  # Click replaces them
        monkeypatch.setattr(sys, name, io.StringIO())
    monkeypatch.setattr(typer, "echo", no_reader)
    assert cli.run(["version"]) == 141


def test_the_configuration_is_found_without_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable names a file, else the working folder has one, else other variables are all there is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGATE__LOG__LEVEL", "loud")
    assert cli.run(["check"]) == 2
    assert "the environment: missing section [upstream]" in capsys.readouterr().err
    (tmp_path / "tidegate.toml").write_text("x = 1")
    assert cli.run(["check"]) == 2
    assert "tidegate.toml: unknown key x" in capsys.readouterr().err
    monkeypatch.setenv("TIDEGATE_CONFIG", str(tmp_path / "other.toml"))
    assert cli.run(["check"]) == 2
    assert capsys.readouterr().err == f"tidegate: {tmp_path}/other.toml: No such file or directory\n"


@pytest.mark.parametrize("words", [(), ("tier", "rebuild")], ids=" ".join)
def test_each_command_refuses_an_option_that_is_given_twice(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, "--help", "--help"]) == 2
    said = f"--help is given more than once. See: {' '.join(('tidegate', *words))} --help"
    assert capsys.readouterr().err == f"tidegate: {said}\n"


@pytest.mark.parametrize(("arguments", "command"), [([], "serve"), (["tier", "metadata"], "export")])
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


@pytest.mark.parametrize("setting", ["[listener] bootstrap.port", "[admin] port"])
def test_a_port_that_is_taken_is_a_failure(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, (free,) = tmp_path / "tidegate.toml", free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        bootstrap, admin = (port, 0) if setting.startswith("[listener]") else (free, port)
        config.write_text(
            '[upstream]\nbootstrap.servers = "127.0.0.1:1"\n'
            f'[listener]\nhost = "127.0.0.1"\nbootstrap.port = {bootstrap}\n[admin]\nport = {admin}\n'
            f'[storage]\nimplementation = "local"\npath = "{tmp_path}/tier"\n[state]\npath = "{tmp_path}/state"\n'
        )
        assert cli.run(["serve", "--config", str(config)]) == FAILED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tidegate: ")]
    said = "Address already in use: end the process that has the port, or set another"
    assert line == f"tidegate: {setting}: 127.0.0.1:{port}: {said}"


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("[storage]\nimplementation = 'tape'\n", "[storage] tape: no remote storage manager is called 'tape'"),
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


def test_a_metadata_manager_that_is_not_installed_is_misuse(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = "remote.log.metadata.manager.class.name"
    config.write_text(f"{manager} = 'floppy'\n{NOBODY}[storage]\nimplementation = 'local'\npath = '/'\n")
    for command in ("check", "serve"):
        assert cli.run([command, "--config", str(config)]) == MISUSED
        said = "".join(capsys.readouterr())
        assert f"{manager}: no remote log metadata manager is called 'floppy'; installed are" in said


def checked(config: Path, state: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    storage = f"[storage]\nimplementation = 'local'\npath = '{config.parent}'\n"
    config.write_text(f"{NOBODY}[state]\npath = '{state}'\n{storage}")
    assert cli.run(["check", "--config", str(config)]) == FINDINGS
    return capsys.readouterr().out


def test_a_state_folder_that_is_none_is_a_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = checked(config, config / "state", capsys)
    assert f"problem: [state] path: {config} is not a folder: change `path`" in said


def test_a_state_folder_that_another_proxy_uses_is_a_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config.parent / "state" / "metadata"
    folder.mkdir(parents=True)
    said = f"problem: [state] path: another proxy uses {folder.parent}: each proxy needs a folder of its own"
    with (folder / LOCK_FILE).open("ab") as lock:
        assert said not in checked(config, folder.parent, capsys)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert said in checked(config, folder.parent, capsys)


def test_check_creates_no_state_folder(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = config.parent / "new" / "state"
    said = checked(config, state, capsys)
    assert "problem: [upstream] no broker answers at 127.0.0.1:1" in said
    assert said.splitlines()[-1] == "1 problem"
    assert not state.parent.exists()


def test_check_and_serve_agree_on_a_folder_that_cannot_be_written(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No user may create a file in /proc, though its mode allows that to root."""
    assert "problem: [state] path: /proc cannot be written: " in checked(config, "/proc/tidegate", capsys)
    with pytest.raises(RemoteTierError, match=r"\[state\] path: /proc/tidegate/metadata cannot be created: "):
        metadata_folder(load_config(config))


def test_the_settings_of_topics_have_lines_of_their_own(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(NOBODY)
    settings = {
        "retention.ms": TopicSetting("retention.ms", "604800000", "broker"),
        "local.retention.ms": TopicSetting("local.retention.ms", "3600000", "file"),
        "remote.log.copy.disable": TopicSetting("remote.log.copy.disable", "false", "default"),
    }
    orders = topics.TieredTopic("orders", "id", 1, 2, 4096, None, None, None, None, (), settings, True, False)
    monkeypatch.setattr(topics, "run_command", lambda work: [orders])
    assert cli.run(["tier", "topics", "--config", str(config)]) == 0
    without = capsys.readouterr().out
    assert "retention" not in without
    assert cli.run(["tier", "topics", "--settings", "--config", str(config)]) == 0
    said = capsys.readouterr().out.removeprefix(without)
    assert [line.split() for line in said.splitlines() if "orders" in line] == [
        ["orders", "retention.ms", "7", "d", "broker"],
        ["orders", "local.retention.ms", "1", "h", "file"],
    ]


def test_an_interrupt_during_the_imports_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Interrupts(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            if fullname == "proxy.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "proxy.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["tidegate", "init"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INTERRUPTED
    assert capfd.readouterr() == ("", "")
