"""Fixtures for real servers and unique topic names. The first test that needs a server starts it, once per run."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import tempfile
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from proxy.logging_setup import TextFormatter
from tests.support import hanging_tests
from tests.support.clients.kafka_tools import KafkaTools
from tests.support.rigs.security_rig import assert_nothing_secret_was_said, proxy_before, sasl, section
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.servers.certificates import Authority
from tests.support.servers.hdfs import SUPERUSER, HdfsCluster
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.object_stores import Azurite, FakeGcs
from tests.support.servers.own_server import OwnServer
from tests.support.servers.producing import TopicWith
from tests.support.servers.secure_kafka import add_users, secure_kafka
from tests.support.servers.speaking import said_since
from tests.support.servers.tidegate import TidegateProcess
from tests.support.servers.versitygw import VersityGateway
from tests.support.temporary_folder import use_memory
from tiers.broker.client import BrokerClient

# No test asserts timing, so hypothesis has no deadline and no health check for slow machines. Two runs of a commit try
# the same examples. `make soak` tries others, and more of them.
settings.register_profile(
    "same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=25
)
settings.register_profile("random", settings.get_profile("same"), derandomize=False, max_examples=100)
settings.load_profile(os.environ.get("TIDEGATE_HYPOTHESIS", "same"))

Server = TypeVar("Server", bound=OwnServer)
BROKER_HOST = "localhost"
"""The host that all brokers advertise. The proxies advertise 127.0.0.1, so no client of a proxy may see this name."""


_deaths = pytest.StashKey[list[str]]()


class GroupTimes:
    """Sums the time of the tests of each group and writes it as the last line of the summary of a run with xdist."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a setup, a call or a teardown. xdist appends the group of a test to its node id."""
        _, at, group = report.nodeid.rpartition("@")
        if at and hasattr(report, "node"):
            self._seconds[group if group in _SERVERS else "without servers"] += report.duration

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the terminal reporter, which lists the failures
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        yield
        longest_first = sorted(self._seconds.items(), key=lambda each: -each[1])
        times = ", ".join(f"{group} {seconds:.0f} s" for group, seconds in longest_first)
        if times:
            terminalreporter.write_line(f"time per group: {times}")


class FailuresAtOnce:
    """Writes the name of a failed test when it fails. The summary does not appear if the run is killed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)  # after the letter of the terminal reporter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and (reporter := self._config.pluginmanager.get_plugin("terminalreporter")):
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            reporter.ensure_newline()
            reporter.write_line(f"{report.nodeid} failed in {report.when}: {reason.partition(chr(10))[0]}")


@pytest.hookimpl(trylast=True)  # after pytest's own faulthandler, which mixes its output with that of other processes
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        use_memory()  # the test processes inherit the choice
        config.pluginmanager.register(FailuresAtOnce(config))
    config.stash[_deaths] = []
    config.pluginmanager.register(GroupTimes())
    config.pluginmanager.register(hanging_tests)
    logs = config.pluginmanager.get_plugin("logging-plugin")
    assert logs is not None
    logs.report_handler.setFormatter(TextFormatter())  # with all fields
    if hasattr(config, "workerinput"):
        config.stash[hanging_tests.STACKS] = _last_words(config.workerinput).open("w")
        faulthandler.enable(config.stash[hanging_tests.STACKS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Records how a test process died and its last output. xdist itself only names the test."""
    words = _last_words(node.workerinput)
    if error:
        code = node.gateway._io.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = Path("/proc/meminfo").read_text().splitlines()[2]
        node.config.stash[_deaths].append(f"{node.gateway.id}: {how}; {memory}\n{words.read_text()}")
    words.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the output of the proxies and brokers to a failure's report. Their folders are removed after the run."""
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
        # The default is once a minute. A killed broker would then remember its last deletion of records only if that
        # minute was over.
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
    """One broker with node id 1. Its local log shrinks soon (segments of 1 MiB, a retention check twice a second)."""
    yield from _cluster(request, 1)


@pytest.fixture(scope="session")
def kafka_of_three(request: pytest.FixtureRequest) -> Iterator[KafkaCluster]:
    """Three brokers, node ids 1 to 3. Clients may read from followers. A test restarts the brokers that it stops."""
    yield from _cluster(request, 3)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that signs the certificates of `secured`. A test may sign more certificates with it."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def secured(authority: Authority) -> Iterator[KafkaCluster]:
    """One broker that authenticates its clients. A user has no rights until a test adds them."""
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
    """A real S3 server. A test creates its own bucket. A test that kills the server starts it again."""
    yield from _server(VersityGateway)


@pytest.fixture(scope="session")
def gcs() -> Iterator[FakeGcs]:
    """A server with the interface of Google Cloud Storage. A test creates its own bucket."""
    yield from _server(FakeGcs)


@pytest.fixture(scope="session")
def azure() -> Iterator[Azurite]:
    """A server with the interface of Azure Blob Storage. A test creates its own container."""
    yield from _server(Azurite)


_SERVERS = ("kafka_of_three", "kafka", "secured", "hdfs", "s3", "gcs", "azure")
_WITH_SERVERS_OF_THEIR_OWN = {"integration", "system", "pipeline", "drill"}
"""The test folders in which some tests start a whole cluster of their own."""
_LONG_FILES = ("test_every_io_call.py",)
"""The files without a server that take a minute. At the end of the run, one process would run such a file alone."""


_FULL_FOLDERS = {"system", "drill"}
_FULL_FIXTURES = {"kafka_of_three", "hdfs", "gcs", "azure", "spark"}
"""A test that needs one of them is run by `make test-all` alone."""


def _server_of(item: pytest.Item) -> str | None:
    """Returns the first of `_SERVERS` that a test uses, as a fixture or as a parameter. None: it uses none of them."""
    parameters = (
        item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    )
    asked = {*getattr(item, "fixturenames", ()), *(one for one in parameters if isinstance(one, str))}
    if "spark" in asked:  # its tests that need a Kafka cluster use the one with three brokers
        return "kafka_of_three"
    return next((server for server in _SERVERS if server in asked), None)


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups the tests by server for xdist: all tests of one server run in one process, so it starts once per run.

    xdist takes the groups in this order. The long groups come first, and the short files without a server come last, so
    that all processes end at about the same time.
    """
    for item in items:
        if _is_full(item):
            item.add_marker(pytest.mark.full)
        item.add_marker(pytest.mark.xdist_group(_server_of(item) or item.path.name))
    items.sort(key=_place)


def _is_full(item: pytest.Item) -> bool:
    """Whether only `make test-all` runs the test."""
    folder = item.path.relative_to(item.config.rootpath).parts[1]
    needs = {_server_of(item), *getattr(item, "fixturenames", ())}
    return folder in _FULL_FOLDERS or not _FULL_FIXTURES.isdisjoint(needs)


def _place(item: pytest.Item) -> int:
    server = _server_of(item)
    if server is not None:
        return _SERVERS.index(server)
    if item.path.name in _LONG_FILES:
        return len(_SERVERS)
    return len(_SERVERS) + 1 + (item.path.parent.name not in _WITH_SERVERS_OF_THEIR_OWN)


@pytest.fixture(scope="session")
def hdfs() -> Iterator[HdfsCluster]:
    """A real HDFS cluster. A test creates its own folder. A test that kills a process starts it again."""
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
    """Restores the loggers after each test, because a command that runs within a test sets up logging."""
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
    """Returns a topic name that no other test uses."""
    test = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:80]
    return f"{test}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def topic_with(request: pytest.FixtureRequest, topic_name: str) -> TopicWith:
    """Creates the topic of `topic_name` on the test's cluster with these records. Returns their values."""
    (cluster,) = {"kafka_of_three", "kafka", "secured"}.intersection(request.fixturenames)
    return TopicWith(request.getfixturevalue(cluster).bootstrap_servers, topic_name)


@pytest.fixture
async def tiers(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[TwoTiers]:
    """A proxy in the test's process. It tiers the test's `topic`."""
    async with two_tiers(kafka, tmp_path, PATTERN) as made:
        yield made


@pytest.fixture
def topic(topic_name: str) -> str:
    """Returns the name of a topic that `tiers` tiers, and that no other test uses."""
    return f"tiered-{topic_name}"


@pytest.fixture
async def client(kafka: KafkaCluster) -> AsyncIterator[BrokerClient]:
    client = BrokerClient([kafka.address()], client_id="test")
    await client.open()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="session")
def tools() -> Iterator[KafkaTools]:
    """One Java process for all test files, since a new process has to load and compile the classes again."""
    made = KafkaTools()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def plain(secured: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidegateProcess]:
    """A proxy with plain text on both sides. It copies with SCRAM, in sessions that end every few seconds."""
    home = tmp_path_factory.mktemp("plain")
    with proxy_before(secured, home, "SASL_PLAINTEXT", sasl("SCRAM-SHA-512", home), ["tiered-*"]) as proxy:
        yield proxy
        assert_nothing_secret_was_said(proxy)


@pytest.fixture(scope="module")
def encrypted(
    secured: KafkaCluster, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TidegateProcess]:
    """A proxy with TLS on both sides. Its own connections authenticate with a token."""
    home = tmp_path_factory.mktemp("encrypted")
    more = sasl("OAUTHBEARER", home)
    more += section("upstream.tls", {"ca": authority.ca})
    more += section("listener.tls", {"certificate": authority.identity("proxy")})
    with proxy_before(secured, home, "SASL_SSL", more, ["sealed-*"]) as proxy:
        yield proxy
        assert_nothing_secret_was_said(proxy)
