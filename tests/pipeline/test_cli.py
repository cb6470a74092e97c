"""A mistake of a user gives one line and an exit code, and no traceback."""

from __future__ import annotations

import pkgutil
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
        (["merge", "--config", "x", "--below", "big"], "'--below': 'big': expected a number and one of the units"),
        (["sql", "--config", "x", "--topics", "[", "select 1"], "'--topics': '[' is not a regular expression: "),
        (
            ["sql", "--config", "x", "--option", "a=1", "--option", "a=2", "select 1"],
            "--option: a is given more than once",
        ),
        (["rebuild", "--config", "x", "--topics", "a"], "--topics needs --indexes-only"),
        (["rebuild", "--config", "x", "--indexes-only", "--into", "a"], "--indexes-only excludes --into, --cluster,"),
        (["offload", "--config", "x", "--dry-run", "--interval", "1m"], "--dry-run and --interval exclude each other"),
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


OF_EXECUTOR = PySparkException("Traceback:\ntiers.open_tier.RemoteTierError: the cluster has no topic x\n\tat org.x")
TIDEGATE_TOML = '[upstream]\n"bootstrap.servers" = "k:9092"\n[storage]\nimplementation = "local"\npath = "/nowhere"\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "ftp://x"], "ftp://x: expected a folder, s3://BUCKET/PREFIX or hdfs://HOST:PORT/PATH"),
        (["--to", "x", "--table", "db.t"], "--table: only with --format iceberg"),
        (["--to", "x", "--format", "iceberg"], "needs --catalog and --table"),
        (["--to", "x", "--value-schema", "xml:f"], "expected json:FILE or avro:FILE"),
        (["--to", "x", "--value-schema", "json:nowhere.json"], "--value-schema: nowhere.json: No such file"),
        (["--to", "x", "--confluent-schema-id", "1"], "only with --value-schema"),
    ],
)
def test_an_export_of_a_wrong_place_or_schema_is_misuse(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tidegate.toml"
    config.write_text(TIDEGATE_TOML)
    assert cli.run(["export", "--config", str(config), "--topic", "orders", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


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


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ConfigError("x.toml: no [storage]"), 2, "x.toml: no [storage]"),
        (PySparkException("Python worker:\npipeline.options.OptionError: there is no topic orders"), 2, "no topic"),
        (TargetError("x: expected a folder"), 2, "x: expected a folder"),
        (JobError("reading: two\nlines"), 3, "reading: two"),
        (NothingChosenError("no topic in the remote tier matches ord"), 2, "matches ord"),
        (ZeroDivisionError("of our own making"), 3, "of our own making"),
        (OF_EXECUTOR, 3, "tidegate-pipeline: the cluster has no topic x"),
        (PySparkException("java: Cannot call methods on a stopped SparkContext."), 3, "its master or a user ended"),
        (RetriableRemoteStorageError("nn: Connection refused"), 3, "check that the store runs"),
        (PySparkException("\ntiers.errors.RetriableRemoteStorageError: no nn\n\tat x"), 3, "check that the store runs"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_each_failure_is_a_line_and_an_exit_code(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Met by the driver, or by an executor, whose message names no class of Tidegate."""

    def failing() -> bool:
        raise raised

    monkeypatch.setattr("pipeline.decode.arrow_records.warm", failing)
    assert cli.run(["warm"]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "tiers." not in err
    assert len(err.splitlines()) == (0 if code == 130 else 1)


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
    [("SIGINT", "default_int_handler"), ("SIGTERM", "SIG_IGN")],
    ids=["ctrl-c", "terminated in the background of a shell"],
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
    ("modules", "lacks"),
    [
        ({"__init__": "__version__ = '3.5.8'"}, "No module named 'pyspark.sql'"),
        ({"__init__": "__version__ = '3.5.8'", "sql": ""}, "cannot import name 'Column'"),
    ],
)
def test_another_release_of_spark_is_named_with_those_that_are_supported(
    modules: dict[str, str], lacks: str, tmp_path: Path
) -> None:
    (tmp_path / "pyspark").mkdir()
    for name, text in modules.items():
        (tmp_path / "pyspark" / f"{name}.py").write_text(text)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pipeline import cli; sys.exit(cli.run(['sql']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 3
    assert ended.stderr.startswith(f"tidegate-pipeline: pyspark 3.5.8 cannot be used ({lacks}")
    asked = next(line.partition(";")[0] for line in requires("tidegate") or () if line.startswith("pyspark"))
    assert f"Tidegate needs {asked}: run `pip install '.[pipeline]'`" in ended.stderr


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
