"""README.md, `docs/start.md` and `docs/day-to-day.md`: the commands of each page in their order, on a real cluster.

The addresses, names and folders are those of this run.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.clients.kafka_tools import KafkaTools
from tests.support.documents import blocks, shell_commands
from tests.support.repository import ROOT
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import consecutive_free_ports, free_ports
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.versitygw import ACCESS_KEY_ID, SECRET_ACCESS_KEY, VersityGateway
from tiers.config.total_retention import RETENTION_MINUTES

pytestmark = [pytest.mark.integration, pytest.mark.full]

ALTER = "kafka-configs.sh --bootstrap-server tidegate.example.org:9092 --alter --topic orders-eu --add-config"


ELSEWHERE = (
    "make", "python3 -m venv", ".venv/bin/pip", "/opt/tidegate/bin/pip", "git pull", "systemctl", "curl",
    "tidegate tier verify --resume",
    f"{ALTER} remote.storage.enable=true,remote.log.copy", f"{ALTER} remote.storage.enable=false",
)  # fmt: skip
"""These install Tidegate, or other tests run them."""


class Reader:
    """A reader of a page: works in a folder, and types the commands."""

    def __init__(self, page: str, home: Path, here: Mapping[str, str], tools: KafkaTools) -> None:
        self.home = home
        self._here, self._tools = here, tools
        self._todo = (each for each in shell_commands(ROOT / page) if not each.startswith(ELSEWHERE))

    def here(self, text: str) -> str:
        for theirs, mine in self._here.items():
            text = text.replace(theirs, mine)
        return text

    def write_settings(self, page: str) -> None:
        """Writes the first settings of the page into the file that its commands name."""
        file = next(block.text for block in blocks(ROOT / page) if block.language == "toml")
        (self.home / "tidegate.toml").write_text(self.here(file))

    def next_is(self, what: str) -> str:
        """Returns the next command of the page."""
        command = next(self._todo)
        assert what in command
        return command

    def is_done(self) -> bool:
        return list(self._todo) == []

    def program(self, command: str) -> list[str]:
        return [sys.executable, "-m", "tidegate", *shlex.split(self.here(command))[1:]]

    def run(self, command: str) -> str:
        """Returns the standard output. Fails if the command fails."""
        return self._ended(command)[0]

    def remarks(self, command: str) -> str:
        """Runs the command, and returns the standard error."""
        return self._ended(command)[1]

    def _ended(self, command: str) -> tuple[str, str]:
        words = shlex.split(self.here(command))
        if words[0].startswith("kafka-"):
            code, output, errors = self._tools.run(words[0].removesuffix(".sh"), None, *words[1:])
        else:
            words = self.program(command) if Path(words[0]).name == "tidegate" else words
            ended = subprocess.run(words, cwd=self.home, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            code, output, errors = ended.returncode, ended.stdout, ended.stderr
        assert code == 0, f"{command}\n{output}\n{errors}"
        return output, errors

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        with (self.home / "serve.out").open("wb") as log:
            process = subprocess.Popen(self.program(command), cwd=self.home, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0, (self.home / "serve.out").read_text()
        finally:
            process.kill()
            process.wait()


def succeeds(attempt: Callable[[], object]) -> Callable[[], bool]:
    """The proxy is not ready at once, and the page's reader tries again."""

    def succeeded() -> bool:
        try:
            attempt()
        except AssertionError:
            return False
        return True

    return succeeded


def test_a_reader_of_the_tutorial_sees_both_tiers(kafka: KafkaCluster, tools: KafkaTools, tmp_path: Path) -> None:
    bootstrap = consecutive_free_ports(3)
    (admin,) = free_ports(1)
    here = {
        "localhost:9092": kafka.bootstrap_servers,
        "localhost:19092": f"127.0.0.1:{bootstrap}",
        "= 19092": f"= {bootstrap}",
        "= 19093": f"= {bootstrap + 1}",
        # The cluster of this run has a metadata topic of other tests, and the machine may have another proxy.
        "__remote_log_metadata": "__try_metadata",
        "[upstream]": f'remote.log.metadata.topic.name = "__try_metadata"\n[admin]\nport = {admin}\n[upstream]',
    }
    reader = Reader("docs/start.md", tmp_path, here, tools)
    reader.write_settings("docs/start.md")
    reader.run(reader.next_is("mkdir"))
    assert reader.run(reader.next_is("tidegate check")).splitlines()[-1].startswith("no problems")
    with reader.serving(reader.next_is("tidegate serve")):
        create = reader.next_is("kafka-topics.sh")
        until(succeeds(lambda: reader.run(create)))
        reader.run(reader.next_is("kafka-producer-perf-test.sh"))
        reader.run(reader.next_is("tidegate tier bounds"))
        at_the_broker, through_tidegate = reader.next_is("kafka-get-offsets.sh"), reader.next_is("kafka-get-offsets.sh")
        until(lambda: reader.run(at_the_broker).strip() != "try-tidegate:0:0")
        assert reader.run(through_tidegate).strip() == "try-tidegate:0:0"
        records = reader.run(reader.next_is("kafka-console-consumer.sh")).splitlines()
        assert len(records) == 20_000
        assert {len(record) for record in records} == {1_000}
    reader.run(reader.next_is("--delete --topic try-tidegate"))
    reader.run(reader.next_is("--delete --topic __remote_log_metadata"))
    assert "was successful" in reader.run(reader.next_is("kafka-consumer-groups.sh"))
    reader.run(reader.next_is("rm -r"))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert reader.is_done()


class OrdersSite:
    """The cluster, the store and the topic `orders-eu` of README.md and docs/day-to-day.md, under names of this run."""

    def __init__(self, kafka: KafkaCluster, store: VersityGateway, run: str) -> None:
        self.topic = f"{run}-eu"
        self._kafka = kafka
        self.bootstrap = consecutive_free_ports(3)
        (admin,) = free_ports(1)
        settings = {
            "remote.log.metadata.topic.name": f"__metadata-{run}",
            "remote.log.metadata.topic.num.partitions": 1,
        }
        lines = [f"{key} = {value!r}" for key, value in settings.items()]
        lines.append("remote.log.manager.task.interval.ms = '1s'")
        keys = [f"access.key.id = '{ACCESS_KEY_ID}'", f"secret.access.key = '{SECRET_ACCESS_KEY}'"]
        keys += [f"endpoint.url = '{store.endpoint_url}'", "path.style = true", "bucket ="]
        self.bucket = run
        self.here = {
            "kafka-1:9092,kafka-2:9092": kafka.bootstrap_servers,
            "tidegate.example.org:9092": f"127.0.0.1:{self.bootstrap}",
            "tidegate.example.org": "127.0.0.1",
            "= 9092": f"= {self.bootstrap}",
            "= 9100": f"= {self.bootstrap}",  # the broker's id is 1
            "eu-central-1": "us-east-1",
            "bucket =": "\n".join(keys),
            "my-log-segments": self.bucket,
            "orders-": f"{run}-",
            "[upstream]": "\n".join([*lines, "[admin]", f"port = {admin}", "[upstream]"]),
        }

    def reader(self, page: str, home: Path, tools: KafkaTools) -> Reader:
        folders = {"/var/lib/tidegate": str(home / "state"), "/var/tmp": str(home)}
        reader = Reader(page, home, {**self.here, **folders}, tools)
        reader.write_settings("README.md")
        return reader

    def fill(self) -> None:
        create_topic(self._kafka.bootstrap_servers, self.topic)
        produce(self._kafka.bootstrap_servers, self.topic, random_values(100))


@pytest.fixture
async def site(kafka: KafkaCluster, s3: VersityGateway, topic_name: str) -> OrdersSite:
    site = OrdersSite(kafka, s3, topic_name.replace("_", "-").lower()[-40:].strip("-"))
    await s3.create_bucket(site.bucket)
    site.fill()
    return site


def test_a_reader_of_the_readme_runs_a_proxy(site: OrdersSite, tools: KafkaTools, tmp_path: Path) -> None:
    reader = site.reader("README.md", tmp_path, tools)
    assert reader.run(reader.next_is("tidegate check")).splitlines()[-1].startswith("no problems")
    with reader.serving(reader.next_is("tidegate serve")):
        bounds = reader.next_is("tidegate tier bounds")
        until(lambda: succeeds(lambda: reader.run(bounds))() and site.topic in reader.run(bounds))
        assert site.topic in reader.run(reader.next_is("tidegate explain"))
        assert "local, with long polls" in reader.run(reader.next_is("tidegate top"))
        altered = reader.run(reader.next_is("kafka-configs.sh"))
        assert f"Completed updating config for topic {site.topic}." in altered
    assert reader.is_done()


def test_an_operator_runs_the_commands_of_the_page(site: OrdersSite, tools: KafkaTools, tmp_path: Path) -> None:
    reader = site.reader("docs/day-to-day.md", tmp_path, tools)
    with reader.serving("tidegate serve"):
        alter = reader.next_is("kafka-configs.sh")
        until(succeeds(lambda: reader.run(alter)))
        shown = [line.split() for line in reader.run(reader.next_is("tidegate tier topics")).splitlines()]
        assert [site.topic, RETENTION_MINUTES, "90", "d", "topic"] in shown
        reader.run(reader.next_is("tidegate tier segments"))
        reader.run(reader.next_is(f"{RETENTION_MINUTES}=43200"))
        assert f"{RETENTION_MINUTES}=43200" in reader.run(reader.next_is("--describe"))
        assert "Nothing was written." in reader.remarks(reader.next_is("tidegate tier pause"))
        for pause in ("tidegate tier pause", "--reading", "tidegate tier resume"):
            assert "was recorded" in reader.remarks(reader.next_is(pause))
    assert reader.is_done()
