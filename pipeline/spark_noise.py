"""What Spark's JVM says on standard error, without what it says whatever happens.

Spark talks before its log level is known, and again when its Python processes end; a job's own errors would drown in
it. So a JVM that we start writes into a pipe: known noise is dropped, all else comes out as it is, a worker's own last
words too. A JVM that spark-submit starts writes where it likes.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Final

from py4j.java_gateway import JavaGateway
from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

_NOISE: Final = re.compile(
    rb"WARNING: Using incubator modules"
    rb"|Using Spark's default log4j profile"
    rb"|Setting (?:default|Spark) log level to"
    rb"|To adjust logging level use"
    rb"|\S+ \S+ WARN (?:NativeCodeLoader|Utils): (?:Unable to load native-hadoop|Your hostname|Set SPARK_LOCAL_IP)"
)
_TRACEBACK: Final = b"Traceback (most recent call last):\n"
_DAEMON_FRAME: Final = re.compile(rb'  File "[^"]*pyspark/daemon\.py", line \d+, in (?:manager|worker)$')
_BROKEN_PIPE: Final = b"BrokenPipeError: [Errno 32] Broken pipe\n"
_STDERR = 2


class QuietJvm:
    """A JVM of ours; `is_ending` drops all that it still says."""

    def __init__(self, conf: SparkConf) -> None:
        """Raises `PySparkRuntimeError` when it does not start, after what it said about that."""
        self.is_ending = False
        reading, writing = os.pipe()
        pump = threading.Thread(target=self._pump, args=(reading,), name="tidegate-spark-stderr", daemon=True)
        pump.start()
        failed = True
        try:
            self.gateway: JavaGateway = launch_gateway(conf, {"stderr": writing})  # type: ignore[no-untyped-call]  # of pyspark
            failed = False
        finally:
            os.close(writing)
            if failed:
                pump.join()

    def _pump(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in without_noise(lines):
                if not self.is_ending:
                    with contextlib.suppress(OSError):  # read on, or the JVM would stand still
                        os.write(_STDERR, line)


def without_noise(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Also without the traceback of a Python process that Spark needed no more, as when a query has rows enough.

    Processes write at once, and their lines may be mixed."""
    held = 0
    is_of_daemon = False
    for line in lines:
        if line == _TRACEBACK:
            held += 1
        elif _DAEMON_FRAME.match(line):
            held, is_of_daemon = 0, True
        elif not (is_of_daemon and line == _BROKEN_PIPE):
            is_of_daemon = False
            yield from [_TRACEBACK] * held
            held = 0
            if not _NOISE.match(line):
                yield line
