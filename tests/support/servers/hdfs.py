"""A real HDFS for tests: one NameNode and one DataNode process, on loopback, with their own folder.

* `start` returns at once, because the start takes half a minute. `wait` returns when a block can be written.
* The ports stay the same when a process restarts. Acknowledged data survives a kill.
* HDFS checks permissions and refuses a user without rights. The user who started it is the superuser.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from xml.sax.saxutils import escape

from tests.support.servers.jars import ServerUnavailable, jars, java, pom_property
from tests.support.servers.kafka import SHORT_LIVED
from tests.support.servers.ports import free_ports

POM = Path(__file__).with_name("hdfs.xml")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
SUPERUSER = "tidegate"
_OPENED = ("lang", "nio", "util", "util.concurrent", "net")
_LOG4J = """log4j.rootLogger=WARN,out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


class HdfsCluster:
    """A context manager that starts the cluster, waits for it and stops it."""

    def __init__(self) -> None:
        self._java = java()
        self._libs = jars(POM, f"hadoop-{pom_property(POM, 'hadoop.version')}")
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-hdfs-"))
        self.name_node_port, self.data_node_port, *others = free_ports(5)
        self._http_port, self._ipc_port, self._data_node_http_port = others
        self.url = f"hdfs://127.0.0.1:{self.name_node_port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starting: threading.Thread | None = None
        self._failure: ServerUnavailable | None = None
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        self.start()
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Formats the folder and starts both processes, in the background."""
        self._write_settings()
        self._starting = threading.Thread(target=self._format_and_start, name="hdfs-start", daemon=True)
        self._starting.start()

    def _format_and_start(self) -> None:
        formatted = subprocess.run(
            self._command(NAME_NODE, "-format", "-nonInteractive", "-force"),
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if formatted.returncode != 0:
            last = formatted.stderr.strip().splitlines()[-1:] or ["no output"]
            self._failure = ServerUnavailable(f"the NameNode did not format its folder: {last[0]}")
            return
        self.start_name_node()
        self.start_data_node()

    def start_name_node(self) -> None:
        self._start(NAME_NODE)

    def start_data_node(self) -> None:
        self._start(DATA_NODE)

    def kill_data_node(self) -> None:
        self._kill(DATA_NODE)

    def wait(self) -> None:
        """Returns when the NameNode has left its safe mode and knows a live DataNode."""
        self._join()
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            dead = next((name for name, process in self._processes.items() if process.poll() is not None), None)
            if dead is not None or time.monotonic() > deadline:
                name = dead or NAME_NODE
                last = self._output(name).read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
                self.stop()
                raise ServerUnavailable(f"HDFS did not start: {name.rpartition('.')[2]}: {last[0]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends both processes and removes the folder. A second call does nothing."""
        self._join()
        for process in self._processes.values():
            process.terminate()
        for name, process in list(self._processes.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            self._kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _join(self) -> None:
        if self._starting is not None:
            self._starting.join()
            self._starting = None

    def settings(self, path: str) -> dict[str, str]:
        """Returns the settings of `HdfsRemoteStorageManager` for this cluster. `$HADOOP_USER_NAME` must be set too."""
        return {"url": self.url, "path": path, "min.replicas": "1"}

    @property
    def web_url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    def synced(self) -> int:
        """Returns how many times the DataNode called fsync so far."""
        query = f"http://127.0.0.1:{self._data_node_http_port}/jmx?qry=Hadoop:service=DataNode,name=DataNodeActivity*"
        with urllib.request.urlopen(query, timeout=30) as answer:
            return sum(int(bean["FsyncCount"]) for bean in json.load(answer)["beans"])

    def blocks(self, path: str) -> int:
        """Returns the number of blocks of a file."""
        query = f"{self.web_url}/webhdfs/v1{path}?op=GET_BLOCK_LOCATIONS&user.name={SUPERUSER}"
        with urllib.request.urlopen(query, timeout=30) as answer:
            return len(json.load(answer)["LocatedBlocks"]["locatedBlocks"])

    @contextlib.contextmanager
    def second_data_node(self) -> Iterator[None]:
        """Runs another DataNode, which the NameNode knows when the context begins."""
        name = "second"
        ports = free_ports(3)
        addresses = zip(("address", "ipc.address", "http.address"), ports, strict=True)
        options = [f"-Ddfs.datanode.{key}=127.0.0.1:{port}" for key, port in addresses]
        options.append(f"-Ddfs.datanode.data.dir={self.folder / 'second'}")
        command = [*self._command(DATA_NODE), *options]
        with self._output(name).open("ab") as output:
            process = subprocess.Popen(command, cwd=self.folder, env=self._environment(), stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while self._live_data_nodes() < 2:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"the second DataNode did not start: {self._output(name).read_text()[-500:]}"
                    )
                time.sleep(0.1)
            removed = self._removed_data_nodes()
            yield
        finally:
            process.kill()
            process.wait()
        # A NameNode that believes in a dead DataNode gives it blocks, and each write of such a block fails. The number
        # of live DataNodes drops a moment before the NameNode stops that.
        while self._removed_data_nodes() == removed:
            time.sleep(0.1)

    def _live_data_nodes(self) -> int:
        return self._name_node_metric("FSNamesystemState", "NumLiveDataNodes")

    def _removed_data_nodes(self) -> int:
        """Returns how many DataNodes the NameNode has removed so far because they sent no heartbeats."""
        return self._name_node_metric("FSNamesystem", "ExpiredHeartbeats")

    def _name_node_metric(self, bean: str, name: str) -> int:
        query = f"{self.web_url}/jmx?qry=Hadoop:service=NameNode,name={bean}"
        with urllib.request.urlopen(query, timeout=30) as answer:
            return int(json.load(answer)["beans"][0][name])

    def _is_ready(self) -> bool:
        query = f"http://127.0.0.1:{self._http_port}/jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
        try:
            with urllib.request.urlopen(query, timeout=30) as answer:
                (info,) = json.load(answer)["beans"]
        except (OSError, ValueError):
            return False
        return info["Safemode"] == "" and any(
            node["adminState"] == "In Service" for node in json.loads(info["LiveNodes"]).values()
        )

    def _start(self, main: str) -> None:
        with self._output(main).open("ab") as output:
            self._processes[main] = subprocess.Popen(
                self._command(main), cwd=self.folder, env=self._environment(), stdout=output, stderr=output
            )

    def _kill(self, main: str) -> None:
        process = self._processes.pop(main, None)
        if process is not None:
            process.kill()
            process.wait()

    def _output(self, main: str) -> Path:
        return self.folder / f"{main.rpartition('.')[2]}.out"

    @staticmethod
    def _environment() -> dict[str, str]:
        return os.environ | {"HADOOP_USER_NAME": SUPERUSER}

    def _command(self, main: str, *arguments: str) -> list[str]:
        opens = [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _OPENED]
        options = ["-Xmx512m", *SHORT_LIVED, "-XX:+UseSerialGC", *opens, f"-Dhadoop.home.dir={self.folder}"]
        return [self._java, *options, "-cp", f"{self.folder / 'conf'}:{self._libs}/*", main, *arguments]

    def _write_settings(self) -> None:
        conf = self.folder / "conf"
        # Both daemons look for these files in their class path, and end if they are missing.
        for name in ("hdfs", "datanode"):
            (conf / "webapps" / name).mkdir(parents=True)
        address = "127.0.0.1"
        core = {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(self.folder / "data")}
        hdfs = {
            "dfs.replication": "1",
            "dfs.permissions.superusergroup": SUPERUSER,
            "dfs.namenode.rpc-address": f"{address}:{self.name_node_port}",
            "dfs.namenode.http-address": f"{address}:{self._http_port}",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.safemode.extension": "0",
            # By default, closing a file waits half a second for the DataNode's next report.
            "dfs.namenode.file.close.num-committed-allowed": "1",
            # A small page lets a short listing have more than one page.
            "dfs.ls.limit": "20",
            "dfs.namenode.heartbeat.recheck-interval": "500",
            "dfs.heartbeat.interval": "1",
            "dfs.datanode.address": f"{address}:{self.data_node_port}",
            "dfs.datanode.ipc.address": f"{address}:{self._ipc_port}",
            "dfs.datanode.http.address": f"{address}:{self._data_node_http_port}",
            "dfs.datanode.hostname": address,
        }
        for name, properties in (("core", core), ("hdfs", hdfs)):
            lines = [
                f"<property><name>{key}</name><value>{escape(value)}</value></property>"
                for key, value in properties.items()
            ]
            (conf / f"{name}-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")
        (conf / "log4j.properties").write_text(_LOG4J)
