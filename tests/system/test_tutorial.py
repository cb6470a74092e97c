"""`docs/start.md` from top to bottom: its file and its commands, in their order, on a real cluster.

The addresses are those of this run. Other tests run the demo and the installation.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.clients.kafka_tools import KafkaTools
from tests.support.documents import blocks
from tests.support.repository import ROOT
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import consecutive_free_ports, free_ports

pytestmark = [pytest.mark.integration, pytest.mark.full]

BLOCKS = blocks(ROOT / "docs/start.md")
TIDEGATE = ".venv/bin/tidegate"
COMMANDS = [command for block in BLOCKS if block.language == "sh" for command in block.commands()]
ELSEWHERE = ("make demo", "python3 -m venv", ".venv/bin/pip")
"""The commands whose own tests are elsewhere."""


class Reader:
    """A reader of the page: works in a folder, and types the commands."""

    def __init__(self, home: Path, addresses: dict[str, str], tools: KafkaTools) -> None:
        self.home, self.tools = home, tools
        self._addresses = addresses

    def here(self, text: str) -> str:
        for address, mine in self._addresses.items():
            text = text.replace(address, mine)
        return text

    def program(self, command: str) -> list[str]:
        return [sys.executable, "-m", "proxy", *shlex.split(self.here(command))[1:]]

    def run(self, command: str) -> str:
        """Returns the standard output. Fails if the command fails."""
        words = shlex.split(self.here(command))
        if words[0].startswith("kafka-"):
            code, output, errors = self.tools.run(words[0].removesuffix(".sh"), None, *words[1:])
        else:
            words = self.program(command) if words[0] == TIDEGATE else words
            ended = subprocess.run(words, cwd=self.home, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            code, output, errors = ended.returncode, ended.stdout, ended.stderr
        assert code == 0, f"{command}\n{output}\n{errors}"
        return output

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


@pytest.fixture
def reader(kafka: KafkaCluster, tools: KafkaTools, tmp_path: Path) -> Reader:
    bootstrap = consecutive_free_ports(3)
    (admin,) = free_ports(1)
    addresses = {
        "localhost:9092": kafka.bootstrap_servers,
        "localhost:19092": f"127.0.0.1:{bootstrap}",
        "= 19092": f"= {bootstrap}",
        "= 19093": f"= {bootstrap + 1}",
        # The cluster of this run has a metadata topic of other tests, and the machine may have another proxy.
        "[upstream]": f'remote.log.metadata.topic.name = "__try_metadata"\n[admin]\nport = {admin}\n[upstream]',
    }
    return Reader(tmp_path, addresses, tools)


def test_a_reader_of_the_tutorial_sees_both_tiers(reader: Reader) -> None:
    (file,) = [block.text for block in BLOCKS if block.language == "toml"]
    (reader.home / "tidegate.toml").write_text(reader.here(file))
    todo = iter([command for command in COMMANDS if not command.startswith(ELSEWHERE)])
    kinds: list[str] = []

    def next_is(what: str) -> str:
        command = next(todo)
        assert what in command
        kinds.append(what)
        return command

    reader.run(next_is("mkdir"))
    assert reader.run(next_is("tidegate check")).splitlines()[-1] == "no problems"
    with reader.serving(next_is("tidegate serve")):
        create = next_is("kafka-topics.sh")
        until(succeeds(lambda: reader.run(create)))
        reader.run(next_is("kafka-producer-perf-test.sh"))
        reader.run(next_is("tidegate tier bounds"))
        at_the_broker, through_tidegate = next_is("kafka-get-offsets.sh"), next_is("kafka-get-offsets.sh")
        until(lambda: reader.run(at_the_broker).strip() != "try-tidegate:0:0")
        assert reader.run(through_tidegate).strip() == "try-tidegate:0:0"
        records = reader.run(next_is("kafka-console-consumer.sh")).splitlines()
        assert len(records) == 20_000
        assert {len(record) for record in records} == {1_000}
    assert list(todo) == []


def succeeds(attempt: Callable[[], object]) -> Callable[[], bool]:
    """The proxy is not ready at once, and the page's reader tries again."""

    def succeeded() -> bool:
        try:
            attempt()
        except AssertionError:
            return False
        return True

    return succeeded
