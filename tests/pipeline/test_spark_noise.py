"""Messages of Spark that say nothing of a job are dropped. A job's own errors are shown."""

from __future__ import annotations

from pipeline.spark.spark_noise import without_noise

DAEMON = b'  File "/python/lib/pyspark.zip/pyspark/daemon.py", line 264, in manager\n'
WORKER = b'  File "/python/lib/pyspark.zip/pyspark/daemon.py", line 95, in worker\n'
TRACEBACK = b"Traceback (most recent call last):\n"
BROKEN = b"BrokenPipeError: [Errno 32] Broken pipe\n"


def test_the_start_messages_of_a_jvm_are_dropped() -> None:
    lines = [
        b"WARNING: Using incubator modules: jdk.incubator.vector\n",
        b"Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties\n",
        b"26/11/22 01:04:18 WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address\n",
        b"26/11/22 01:04:20 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform...\n",
        b'Setting Spark log level to "FATAL".\n',
        b"JAVA_HOME is not set\n",
        b"26/11/22 01:04:20 WARN Utils: Service 'sparkDriver' could not bind on port 0\n",
    ]
    assert list(without_noise(lines)) == lines[-2:]


def test_mixed_lines_of_ended_spark_processes_are_dropped() -> None:
    lines = [TRACEBACK, TRACEBACK, DAEMON, WORKER, BROKEN, DAEMON, WORKER, BROKEN, b"import failed\n"]
    assert list(without_noise(lines)) == [b"import failed\n"]


def test_a_traceback_of_a_job_stays_a_broken_pipe_included() -> None:
    lines = [TRACEBACK, b'  File "/job.py", line 3, in task\n', b"    pipe.write(row)\n", BROKEN]
    assert list(without_noise(lines)) == lines
