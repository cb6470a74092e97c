"""`spark_session`: a Spark session with the settings that the jobs and the data sources need, on any master.

* The workers run the driver's Python unless `PYSPARK_PYTHON` names another, because another Python lacks our packages.
* Filters reach the data source, which Spark turns off by default, and rows travel over unix sockets.
* Spark's own progress bar and log are off: we show progress ourselves and report a failed job in one line.
* Speculation is off. Tasks never write the same name twice, so a second attempt would only waste work.
* Spark on this machine alone listens on loopback only, because no other machine has to reach it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from pipeline.spark.spark_noise import QuietJvm

FOR_THE_DATA_SOURCE: Final[Mapping[str, str]] = {"spark.sql.python.filterPushdown.enabled": "true"}
DEFAULTS: Final[Mapping[str, str]] = {
    **FOR_THE_DATA_SOURCE,
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "FATAL",
}
LOOPBACK: Final[Mapping[str, str]] = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

_WORKER_MEMORY: Final = "spark.executor.pyspark.memory"
_MIN_WORKER_MEMORY_MB: Final = 1024
_STANDALONE: Final = "spark://"
_CONNECT_TIMEOUT_S: Final = 5
_MASTER: Final = re.compile(r"local(?:\[[^\]]+\])?|local-cluster\[.+\]|yarn|\w+://.+")

_jvm: QuietJvm | None = None


class SparkSettingError(ValueError):
    """A Spark setting with which no job can work."""


class SparkMasterError(Exception):
    """No Spark master answers at the given address."""


def spark_session(
    master: str | None = None, conf: Mapping[str, str] | None = None, name: str = "tidegate"
) -> SparkSession:
    """Returns the running session of this process, or starts a new one.

    A running session keeps its master and takes from `conf` the settings that can still change. For a new session,
    `master` None means the master that spark-submit was given, else `local[*]`. `conf` overrides the settings of
    spark-submit. Those override the defaults of this module, which override Spark's defaults.

    Raises `SparkSettingError`, `SparkMasterError`, and `PySparkRuntimeError` when Spark does not start."""
    global _jvm  # one per process, like Spark's own context
    if SparkContext._active_spark_context is not None:
        settings = {**FOR_THE_DATA_SOURCE, **(conf or {})}
    else:
        submitted = _submitted()
        master = master or submitted.get("spark.master", "local[*]")
        loopback = LOOPBACK if master.startswith("local") else {}
        settings = {**DEFAULTS, **loopback, **submitted, **(conf or {}), "spark.master": master, "spark.app.name": name}
        _check(settings)
        if master.startswith(_STANDALONE):
            _look_for(master)
        if "spark.pyspark.python" in settings:
            os.environ["PYSPARK_PYTHON"] = settings["spark.pyspark.python"]
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if SparkContext._gateway is None:
            _jvm = QuietJvm(SparkConf(loadDefaults=False).setAll(list(settings.items())))
            SparkContext._ensure_initialized(gateway=_jvm.gateway)
    if _jvm is not None:
        _jvm.is_ending = False
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextmanager
def open_session(
    master: str | None = None, conf: Mapping[str, str] | None = None, name: str = "tidegate"
) -> Iterator[SparkSession]:
    """Yields `spark_session(...)`, and stops the session at the end if this call started it."""
    is_ours = SparkContext._active_spark_context is None
    session = spark_session(master, conf, name)
    try:
        yield session
    finally:
        if is_ours:
            if _jvm is not None:
                _jvm.is_ending = True
            session.stop()


def _submitted() -> dict[str, str]:
    """Returns the settings of spark-submit, which starts the JVM first and hands it these settings."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _check(settings: Mapping[str, str]) -> None:
    """Raises `SparkSettingError` for a malformed master or for too little address space of the Python workers.

    The setting limits address space and not memory in use: the libraries alone map hundreds of MiB."""
    master = settings["spark.master"]
    if not _MASTER.fullmatch(master):
        raise SparkSettingError(f"--master {master}: expected local[*], spark://HOST:PORT, yarn or k8s://URL")
    given = settings.get(_WORKER_MEMORY)
    if given is None:
        return
    read = re.fullmatch(r"(\d+)\s*([kmgtp]?)b?", given.strip().lower())
    if read is None:
        raise SparkSettingError(f"{_WORKER_MEMORY}={given} is not a size")
    size_mb = int(read[1]) * 1024 ** ("kmgtp".index(read[2] or "m") - 1)
    if size_mb < _MIN_WORKER_MEMORY_MB:
        raise SparkSettingError(f"{_WORKER_MEMORY}={given} is too little: a Python worker needs 1g of address space")


def _look_for(master: str) -> None:
    """Checks that at least one of the masters accepts a connection.

    Without this check Spark tries for a minute or two and then reports only that a context was stopped."""
    troubles: list[str] = []
    for place in master.removeprefix(_STANDALONE).split(","):
        host, _, port = place.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S):
                return
        except ValueError:
            raise SparkSettingError(f"--master {master}: expected spark://HOST:PORT") from None
        except OSError as error:
            troubles.append(f"{place}: {error.strerror or error}")
    raise SparkMasterError(f"no Spark master answers at {', '.join(troubles)}")
