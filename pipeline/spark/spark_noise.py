"""`QuietJvm`: a JVM for Spark whose standard error is filtered.

Spark writes messages before its log level is set, and again when its Python processes end. These messages would hide
a job's own errors. A JVM that we start therefore writes into a pipe: this module drops the known noise and passes
everything else on unchanged, including the last output of a Python worker. The output of a JVM that spark-submit starts
cannot be filtered.
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
    """A JVM that this process starts. While `is_ending` is true, all of its output is dropped."""

    def __init__(self, conf: SparkConf) -> None:
        """Raises `PySparkRuntimeError` when the JVM does not start, after its error output was passed on."""
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
                    with contextlib.suppress(OSError):  # keep reading: a full pipe would block the JVM
                        os.write(_STDERR, line)


def without_noise(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Drops known noise, and the traceback of a Python daemon whose pipe Spark closed because a query has enough rows.

    Processes write concurrently, so their lines may be interleaved."""
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
