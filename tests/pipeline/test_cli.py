"""A mistake of a user gives one line and an exit code, and no traceback."""

from __future__ import annotations

import pkgutil
import signal
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from pipeline import cli, commands
from pipeline.chosen_partitions import NothingChosenError
from pipeline.export.job import ExportRequest, IcebergTable, open_ledger
from pipeline.export.target import TargetError, TargetSettings
from tiers.config.tier_config import ConfigError
from tiers.errors import RetriableRemoteStorageError
from tiers.upkeep.runner import JobError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["wram"], "No such command 'wram'. Did you mean 'warm'?"),
        (["warm", "--all"], "No such option: --all"),
        ([], "Missing command"),
        (["usage", "--config", "x", "--by", "week"], "'--by': 'week' is not one of 'topic', 'partition', 'day'"),
        (["merge", "--config", "x", "--below", "big"], "'--below': 'big': expected a number of bytes, or"),
        (["sql", "--config", "x", "--topics", "[", "select 1"], "'--topics': '[' is not a regular expression: "),
        (
            ["sql", "--config", "x", "--option", "a=1", "--option", "a=2", "select 1"],
            "--option: a is given more than once",
        ),
        (["rebuild", "--config", "x", "--topics", "a"], "--topics needs --indexes-only"),
        (["rebuild", "--config", "x", "--indexes-only", "--into", "a"], "--indexes-only excludes --into, --cluster,"),
        (["offload", "--config", "x", "--dry-run", "--interval", "1m"], "--dry-run and --interval exclude each other"),
        (["retain", "--config", "x", "--topics", "a", "--delay", "1d"], "--delay goes with --deleted-topics"),
        (["scrub", "--config", "x", "--apply"], "--apply goes with --delete-orphans"),
        (["scrub", "--config", "x", "--level", "meta", "--resume", "f"], "--resume needs --level batch or deep"),
        (["offload", "--config", "x", "--dry-run", "--max-bytes", "1"], "--dry-run and --max-bytes exclude each other"),
        (["offload", "--config", "x", "--max-bytes", "0"], "--max-bytes: expected at least 1 byte"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


TIDEGATE_TOML = '[upstream]\n"bootstrap.servers" = "k:9092"\n[storage]\nimplementation = "local"\npath = "/nowhere"\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "s3//bucket"], "s3//bucket: expected a folder, s3://BUCKET/PREFIX or hdfs://HOST:PORT/PATH"),
        (["--to", "ftp://x"], "ftp://x: expected a folder, s3://BUCKET/PREFIX or hdfs://HOST:PORT/PATH"),
        (
            ["--to", "x", "--value-schema", "json:nowhere.json"],
            " --value-schema: nowhere.json: No such file or directory. See: tidegate-pipeline export --help",
        ),
    ],
)
def test_an_export_of_a_wrong_place_or_schema_is_misuse(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tidegate.toml"
    config.write_text(TIDEGATE_TOML)
    assert cli.run(["export", "--config", str(config), "--topic", "orders", *arguments]) == 2
    assert capsys.readouterr().err.rstrip().endswith(said)


def test_the_list_of_commands_is_whole_and_loads_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    modules = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    assert set(cli.COMMANDS) == modules - {"common", "failures"}
    listing = "import sys; from pipeline import cli; cli.run(['--help']); print('pyspark' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, timeout=300, check=True)
    assert listed.stdout.splitlines()[-1] == "False"
    for name, about in cli.COMMANDS.items():
        assert f"  {name:<7}  {about}\n" in listed.stdout
        assert cli.run([name, "--help"]) == 0
        assert f"Usage: tidegate-pipeline {name} " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_each_command_refuses_an_option_that_is_given_twice(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split()
    assert cli.run([*words, "--help", "--help"]) == 2
    said = f"--help is given more than once. See: {' '.join(('tidegate-pipeline', *words))} --help"
    assert capsys.readouterr().err == f"tidegate-pipeline: {said}\n"


@pytest.mark.parametrize("command", ["merge", "offload", "rebuild", "retain", "scrub", "usage"])
def test_topics_that_are_no_regular_expression_are_misuse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--config", "/nowhere/x.toml", "--topics", "("]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'(' is not a regular expression: missing )" in line


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigError("x.toml: no [storage]"), 2),
        (PySparkException("Python worker:\npipeline.options.OptionError: there is no topic orders"), 2),
        (PySparkException("Python worker:\nBrokerError: no connection"), 3),
        (TargetError("x: expected a folder"), 2),
        (JobError("reading: two\nlines"), 3),
        (NothingChosenError("no topic in the remote tier matches ord"), 2),
        (PermissionError(13, "Permission denied", "/x"), 3),
        (ZeroDivisionError("of our own making"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_failure_has_its_exit_code(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> bool:
        raise raised

    monkeypatch.setattr("pipeline.decode.arrow_records.warm", failing)
    assert cli.run(["warm"]) == code
    assert len(capsys.readouterr().err.splitlines()) == (0 if code == 130 else 1)


def test_messages_of_executors_name_no_class_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> bool:
        raise PySparkException("Traceback:\ntiers.open_tier.RemoteTierError: the cluster has no topic x\n\tat org.x")

    monkeypatch.setattr("pipeline.decode.arrow_records.warm", failing)
    assert cli.run(["warm"]) == 3
    assert capsys.readouterr().err == "tidegate-pipeline: the cluster has no topic x\n"


def test_an_application_that_its_master_ended_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> bool:
        raise PySparkException("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.")

    monkeypatch.setattr("pipeline.decode.arrow_records.warm", failing)
    assert cli.run(["warm"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tidegate-pipeline: Spark stopped: its master or a user ended the application")


def test_a_store_that_is_not_there_names_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Met by the driver, or by an executor."""
    trouble = "hdfs://nn:8020/tier: Connection refused (os error 111)"
    of_executor = PySparkException(f"Traceback:\ntiers.errors.RetriableRemoteStorageError: {trouble}\n\tat org.x")
    for raised in (RetriableRemoteStorageError(trouble), of_executor):

        def failing(error: Exception = raised) -> bool:
            raise error

        monkeypatch.setattr("pipeline.decode.arrow_records.warm", failing)
        assert cli.run(["warm"]) == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            f"{trouble}: try again; if it still fails, check that the store runs and that its address is right"
        )


ENDED_WHILE_LOADING = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, getattr(signal, sys.argv[2]))
load = builtins.__import__
def end_it(name, scope=None, local=None, names=(), level=0):
    if names and "cli" in names:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return load(name, scope, local, names, level)
builtins.__import__ = end_it
from pipeline.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("sent", "sigint"),
    [("SIGINT", "default_int_handler"), ("SIGTERM", "default_int_handler"), ("SIGTERM", "SIG_IGN")],
    ids=["ctrl-c", "terminated", "terminated in the background of a shell"],
)
def test_an_interrupt_while_libraries_load_prints_nothing(sent: str, sigint: str) -> None:
    command = [sys.executable, "-c", ENDED_WHILE_LOADING, sent, sigint]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_without_the_extra_it_says_what_to_install() -> None:
    hide = "import sys; sys.modules['pyspark'] = None; from pipeline.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 3
    said = "pyspark is missing: run `pip install '.[pipeline]'` in the clone of Tidegate"
    assert ended.stderr == f"tidegate-pipeline: {said}\n"


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({"__init__": "__version__ = '4.1.0'"}, "pyspark 4.1.0 cannot be used (No module named 'pyspark.sql'): "),
        (
            {"__init__": "__version__ = '3.5.8'", "sql": ""},
            "pyspark 3.5.8 cannot be used (cannot import name 'DataFrame' from 'pyspark.sql' ",
        ),
    ],
    ids=["lacks a module", "lacks a name"],
)
def test_another_release_of_spark_is_named_with_those_that_are_supported(
    modules: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "pyspark").mkdir()
    for name, text in modules.items():
        (tmp_path / "pyspark" / f"{name}.py").write_text(text)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pipeline import cli; sys.exit(cli.run(['sql']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 3
    assert ended.stderr.startswith(f"tidegate-pipeline: {said}")
    asked = next(line.partition(";")[0] for line in requires("tidegate") or () if line.startswith("pyspark"))
    assert ended.stderr.endswith(
        f": Tidegate needs {asked}: run `pip install '.[pipeline]'` in the clone of Tidegate\n"
    )


def test_an_export_names_the_missing_extra_of_iceberg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ExportRequest("orders", TargetSettings(tmp_path.as_uri()), IcebergTable("lake", "db.orders"))
    for name in ("pyiceberg", *(name for name in sys.modules if name.startswith("pyiceberg."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "pipeline.export.iceberg", raising=False)
    monkeypatch.setattr("pipeline.decode.arrow_records.warm", lambda: open_ledger(request))
    assert cli.run(["warm"]) == 3
    said = "pyiceberg is missing: run `pip install '.[iceberg]'` in the clone of Tidegate"
    assert capsys.readouterr().err == f"tidegate-pipeline: {said}\n"


def test_sigterm_ends_a_command_as_an_interrupt_does() -> None:
    program = """if True:
        import sys, time
        from pipeline import __main__, cli

        @cli.app.command()
        def wait() -> None:
            try:
                print("waiting", flush=True)
                time.sleep(300)
            finally:
                print("gave back", flush=True)

        sys.argv[1:] = ["wait"]
        __main__.main()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=300)[0] == "gave back\n"
    assert process.returncode == cli.INTERRUPTED
