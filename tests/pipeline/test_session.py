"""A Spark session of a program: quiet, on loopback, one per process, and ended by Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipeline.spark.session import SparkMasterError, SparkSettingError, spark_session
from tests.support.servers.ports import free_ports
from tests.support.servers.spark import QUICK_JAVA

PROGRAM = textwrap.dedent(
    """
    import asyncio, contextlib, os, signal, sys, threading, time
    from pathlib import Path
    from pipeline import cli
    from pipeline.spark import progress
    from pipeline.spark.job import run_tasks
    from pipeline.spark.session import open_session, spark_session
    from pipeline.spark.runner import SparkRunner

    def listening():
        "The addresses on which this program and its children listen, in /proc's own writing."
        lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()]
        inodes = {fields[9]: fields[1].partition(":")[0] for fields in lines if fields[3] == "0A"}
        ours = [Path("/proc/self/fd")]
        for child in Path("/proc/self/task").glob("*/children"):
            ours += [Path("/proc", number, "fd") for number in child.read_text().split()]
        opened = []
        for fd in (fd for folder in ours for fd in folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened.append(str(fd.readlink()))
        return {inodes[inode] for name in opened if (inode := name.removeprefix("socket:[").rstrip("]")) in inodes}

    def squared(number):
        return number * number

    progress.STALLED_POLLS = sys.maxsize  # a busy machine is no cluster without executors

    def waiting(began):
        Path(began).touch()
        time.sleep(1200)

    async def waits(began):
        waiting(began)

    def interrupt(began):
        while not Path(began).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    @cli.app.command()
    def wait(began: str) -> None:
        threading.Thread(target=interrupt, args=(began,), daemon=True).start()
        run_tasks(session, "waiting", [began], waiting)

    @cli.app.command()
    def wait_beside(began: str) -> None:
        threading.Thread(target=interrupt, args=(began,), daemon=True).start()
        asyncio.run(SparkRunner(session).run("waiting", [began], waits))

    with open_session(conf={"spark.driver.extraJavaOptions": sys.argv[2]}) as session:
        print(session.sparkContext.parallelize(range(4), 4).map(squared).collect())
        with open_session("local[7]", {"spark.sql.shuffle.partitions": "3"}) as same:
            print(same.sparkContext.master, same.conf.get("spark.sql.shuffle.partitions"))
        print(session.conf.get("spark.sql.python.filterPushdown.enabled"))
        print(*sorted(listening()))
        print(cli.run(["wait", sys.argv[1]]), cli.run(["wait-beside", sys.argv[1] + "-beside"]))
    """
)
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.full
def test_a_session_is_silent_and_local_and_ends_on_an_interrupt(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, program, tmp_path / "began", QUICK_JAVA],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.stderr == ""
    *lines, listening, interrupted = ended.stdout.splitlines()
    assert lines == ["[0, 1, 4, 9]", "local[*] 3", "true"]
    assert interrupted == "130 130"
    assert listening
    assert set(listening.split()) <= LOOPBACK
    assert ended.returncode == 0


@pytest.mark.parametrize("given", ["512m", "1048575k"])
def test_a_limit_under_which_no_worker_starts_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    with pytest.raises(SparkSettingError, match=f"{given} is too little"):
        spark_session("local[1]", {"spark.executor.pyspark.memory": given})


@pytest.mark.parametrize("master", ["foo", "local[]"])
def test_an_invalid_master_is_refused(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    with pytest.raises(SparkSettingError, match="expected local"):
        spark_session(master)


def test_a_master_that_is_not_there_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    one, other = free_ports(2)
    with pytest.raises(SparkMasterError, match=f"at 127.0.0.1:{one}: .+, localhost:{other}: Connection refused"):
        spark_session(f"spark://127.0.0.1:{one},localhost:{other}")
    with pytest.raises(SparkSettingError, match="expected spark://HOST:PORT"):
        spark_session("spark://nowhere")


def test_without_java_it_says_what_is_needed(tmp_path: Path) -> None:
    config = tmp_path / "tidegate.toml"
    config.write_text(
        '[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[storage]\nimplementation = "local"\npath = "/no"\n'
    )
    command = [sys.executable, "-m", "pipeline", "sql", "--config", str(config), "select 1"]
    environment = {**os.environ, "JAVA_HOME": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 3
    assert ended.stderr.splitlines()[-1].endswith("It needs Java 17 or newer, in JAVA_HOME or on the PATH")
    assert "Traceback" not in ended.stderr
