"""`spark_session`: a Spark session as the jobs and the data source need it, on whatever master.

* The driver's own Python is that of the workers, unless `PYSPARK_PYTHON` says otherwise: another one lacks our code.
* Filters reach the data source (off by default in Spark), rows travel by unix sockets, and Spark's own progress bar and
  log stay quiet: we print progress ourselves.
* Tasks answer for their own retries: a task never writes twice under one name, so speculation would only waste.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

DEFAULTS: Mapping[str, str] = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
}


def spark_session(
    master: str | None = None, conf: Mapping[str, str] | None = None, name: str = "tidegate"
) -> SparkSession:
    """The active session if there is one, `conf` applied. `master` None: what spark-submit says, else `local[*]`.

    A given `conf` wins over the defaults here; both over Spark's."""
    if "PYSPARK_PYTHON" not in os.environ:
        os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    elif "spark.master" not in _submitted():
        builder = builder.master("local[*]")
    if (master or "").startswith("local"):
        # Nothing of a machine of one's own needs to be reachable from outside.
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    for key, value in {**DEFAULTS, **_submitted(), **(conf or {})}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(session.conf.get("spark.log.level", "ERROR") or "ERROR")
    return session


@contextmanager
def open_session(
    master: str | None = None, conf: Mapping[str, str] | None = None, name: str = "tidegate"
) -> Iterator[SparkSession]:
    """As `spark_session`, and stopped at the end unless it was there before."""
    is_ours = SparkSession.getActiveSession() is None
    session = spark_session(master, conf, name)
    try:
        yield session
    finally:
        if is_ours:
            session.stop()


def _submitted() -> dict[str, str]:
    """What spark-submit was given: it starts the JVM first, which then says so itself."""
    from pyspark import SparkConf, SparkContext  # needs a running JVM, which only spark-submit has by now

    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())
