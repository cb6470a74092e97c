"""The same code by spark-submit, on a cluster whose Python has the libraries and no Tidegate."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from pipeline import cli
from tests.servers.spark import QUICK_JAVA, SPARK_SUBMIT, SparkMaster, SparkWorker

PROGRAM = textwrap.dedent(
    """
    import pipeline
    from pipeline.job import run_tasks
    from pipeline.session import open_session
    from protocol.message_schema import load_schema
    from pathlib import Path
    from tiers.storage.registry import remote_storage_manager_names

    def task(number):
        from pipeline.decode.arrow_records import warm
        where = Path(pipeline.__file__).parents[1].name
        return number, where, warm(), load_schema("ShareFetchResponse").name, remote_storage_manager_names()

    with open_session() as session:
        print(session.sparkContext.master)
        for row in run_tasks(session, "looking", [7, 8], task):
            print(*row)
    """
)

PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
LIBRARIES = sysconfig.get_path("purelib")
"""As a path: no .pth file is read there, so that the installed Tidegate is not found."""


def test_every_command_runs_from_the_zip(tmp_path: Path) -> None:
    assert cli.run(["package", str(tmp_path)]) == 0
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'tidegate.zip'}:{LIBRARIES}"}
    command: list[str | Path] = [PYTHON, tmp_path / "tidegate_pipeline.py", "usage", "--config", "/nowhere.toml"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stderr == "tidegate-pipeline: /nowhere.toml: No such file or directory\n"
    assert ended.returncode == 2


@pytest.mark.timeout(400)
def test_a_zip_of_ours_is_all_that_executors_need(tmp_path: Path) -> None:
    assert cli.run(["package", str(tmp_path)]) == 0
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    bare = {"PYSPARK_PYTHON": str(PYTHON), "PYTHONPATH": LIBRARIES}
    with SparkMaster() as master, SparkWorker(master, environment=bare):
        master.wait_for_workers(1)
        ended = subprocess.run(
            [
                SPARK_SUBMIT,
                "--master",
                master.url,
                "--conf",
                "spark.executor.memory=512m",
                "--conf",
                f"spark.executor.extraJavaOptions={QUICK_JAVA}",
                "--driver-java-options",
                QUICK_JAVA,
                "--py-files",
                tmp_path / "tidegate.zip",
                program,
            ],
            env={**os.environ, **bare, "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    each = "tidegate.zip True ShareFetchResponse ['arrow', 'hdfs', 'local', 's3']"
    # spark-submit puts standard error into standard output, and with it how far the job is.
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("looking: ")]
    assert lines == [master.url, f"7 {each}", f"8 {each}"]
