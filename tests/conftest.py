"""Real servers, started once per run by the first test that asks, and names that no other test uses."""

from __future__ import annotations

import faulthandler
import logging
import re
import signal
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.servers.certificates import Authority
from tests.servers.hdfs import SUPERUSER, HdfsCluster
from tests.servers.jars import ServerUnavailable
from tests.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.servers.object_stores import Azurite, FakeGcs
from tests.servers.own_server import OwnServer
from tests.servers.secure_kafka import add_users, secure_kafka
from tests.servers.speaking import said_since
from tests.servers.versitygw import VersityGateway

# No test asserts timing, hypothesis' own deadline and its complaint about slow machines included.
settings.register_profile("tidegate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tidegate")

Server = TypeVar("Server", bound=OwnServer)
BROKER_HOST = "localhost"
"""What the brokers of every session advertise. Proxies under test advertise 127.0.0.1: no client may ever see this."""


_deaths = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)  # after pytest's own, which writes into the middle of what all processes say
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_deaths] = []
    if hasattr(config, "workerinput"):
        faulthandler.enable(_last_words(config.workerinput).open("w"))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Of a process that dies, xdist says no more than at which test."""
    words = _last_words(node.workerinput)
    if error:
        code = node.gateway._io.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = Path("/proc/meminfo").read_text().splitlines()[2]
        node.config.stash[_deaths].append(f"{node.gateway.id}: {how}; {memory}\n{words.read_text()}")
    words.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the proxies and the brokers said meanwhile goes with a failure: their folders do not outlive the run."""
    report = yield
    if report.failed:
        report.sections += said_since(call.start)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for death in config.stash[_deaths]:
        terminalreporter.section("dead process")
        terminalreporter.write_line(death)


def _last_words(worker: dict[str, str]) -> Path:
    return Path(tempfile.gettempdir(), f"tidegate-tests-{worker['testrunuid']}-{worker['workerid']}")


def _cluster(request: pytest.FixtureRequest, brokers: int) -> Iterator[KafkaCluster]:
    settings = {
        **SHRINKS_SOON,
        "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
        # Else once a minute: a broker that is killed knew the last deletion of records again, if that minute was over.
        "log.flush.start.offset.checkpoint.interval.ms": "86400000",
    }
    cluster = KafkaCluster(brokers=brokers, settings=settings, advertised_host=BROKER_HOST, java_options=SHORT_LIVED)
    failed_before = request.session.testsfailed
    try:
        cluster.start()
    except ServerUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)
    try:
        yield cluster
    finally:
        if request.session.testsfailed > failed_before:
            cluster.keep()
            print(f"\nbroker logs are kept in {cluster.folder}")
        cluster.stop()


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[KafkaCluster]:
    """One broker, node id 1; its local log shrinks soon (segments of 1 MiB, retention checked twice a second)."""
    yield from _cluster(request, 1)


@pytest.fixture(scope="session")
def kafka_of_three(request: pytest.FixtureRequest) -> Iterator[KafkaCluster]:
    """Three brokers, node ids 1 to 3, whose followers may be read. A test that stops one starts it again."""
    yield from _cluster(request, 3)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs the certificates of `secured`; a test signs others by it."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def secured(authority: Authority) -> Iterator[KafkaCluster]:
    """One broker that asks who is there; nobody has a right until a test gives it."""
    cluster = secure_kafka(authority)
    try:
        cluster.start()
    except ServerUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)
    try:
        add_users(cluster)
        yield cluster
    finally:
        cluster.stop()


def _server(make: Callable[[], Server]) -> Iterator[Server]:
    try:
        server = make()
    except ServerUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)
    with server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[VersityGateway]:
    """A real S3; a test makes a bucket of its own, and starts again what it kills."""
    yield from _server(VersityGateway)


@pytest.fixture(scope="session")
def gcs() -> Iterator[FakeGcs]:
    """A server of Google Cloud Storage's interface; a test makes a bucket of its own."""
    yield from _server(FakeGcs)


@pytest.fixture(scope="session")
def azure() -> Iterator[Azurite]:
    """A server of Azure Blob Storage's interface; a test makes a container of its own."""
    yield from _server(Azurite)


_SERVERS = ("kafka_of_three", "kafka", "secured", "hdfs", "s3", "gcs", "azure")
_WITH_SERVERS_OF_THEIR_OWN = {"integration", "pipeline"}
"""Folders of tests; some start a whole cluster for themselves."""


def _server_of(item: pytest.Item) -> str | None:
    """The first of `_SERVERS` that a test asks for, itself or by a parameter."""
    parameters = (
        item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    )
    asked = {*getattr(item, "fixturenames", ()), *(one for one in parameters if isinstance(one, str))}
    if "spark" in asked:  # its tests that need a Kafka use that of three brokers
        return "kafka_of_three"
    return next((server for server in _SERVERS if server in asked), None)


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, all that ask for one server run in one of them: it starts once per run.

    The long ones go first, and what needs no server fills up: xdist takes the groups in this order."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_server_of(item) or item.path.name))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    server = _server_of(item)
    if server is not None:
        return _SERVERS.index(server)
    return len(_SERVERS) + (item.path.parent.name not in _WITH_SERVERS_OF_THEIR_OWN)


@pytest.fixture(scope="session")
def hdfs() -> Iterator[HdfsCluster]:
    """A real HDFS; a test makes a folder of its own, and starts again what it kills."""
    try:
        cluster = HdfsCluster()
        cluster.start()
        cluster.wait()
    except ServerUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HADOOP_USER_NAME", SUPERUSER)
        yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """A command run within a test sets logging up; the next test in that process still sees every line."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: each.level for name, each in root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    yield
    root.handlers[:] = handlers
    if root.level != level:
        root.setLevel(level)
    for name, each in root.manager.loggerDict.items():
        if isinstance(each, logging.Logger) and each.level != levels.get(name, logging.NOTSET):
            each.setLevel(levels.get(name, logging.NOTSET))


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A topic name of this test alone."""
    test = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:80]
    return f"{test}-{uuid.uuid4().hex[:8]}"
