"""Every command of the documents parses, and tests/support/documented_commands.py says which test runs it."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import UUID

import pytest

from tests.support import command_lines
from tests.support.command_lines import PROGRAMS, WrongCommandError
from tests.support.documented_commands import HOW, NOT_RUN, how
from tests.support.documents import blocks, inline_commands, shell_commands
from tests.support.repository import ROOT, tracked

PAGES = {str(path.relative_to(ROOT)): path for path in tracked("*.md")}
COMMANDS = [(page, command) for page, path in PAGES.items() for command in shell_commands(path)]
OTHER_LANGUAGES = {"toml", "text", "json", "python", "dockerfile", "{toctree}"}
OURS = ["tidegate", "tidegate-pipeline", "make"]
OTHERS = ["docker", "helm", "kubectl", "pip"]
GENERATED = "docs/commands.md"
"""Its blocks are synopses, which the command line itself prints."""


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_parses_and_says_how_it_is_tested(page: str, command: str) -> None:
    command_lines.check(command)
    how(page, command)


def test_each_entry_fits_a_command_and_names_a_test_or_a_reason() -> None:
    used = {(page, how(page, command)[0]) for page, command in COMMANDS}
    assert used == {(page, beginning) for page, ways in HOW.items() for beginning in ways}
    for way in {way for ways in HOW.values() for way in ways.values()}:
        assert way.startswith(NOT_RUN) or (ROOT / way).is_file(), way


def test_commands_stand_in_shell_blocks_alone() -> None:
    begins = re.compile(rf"^\s*(?:\$ )?(?:\S*/)?(?:{'|'.join(map(re.escape, PROGRAMS))})(?:\.sh)? ", re.MULTILINE)
    for page, path in PAGES.items():
        others = [block for block in blocks(path) if block.language != "sh"]
        assert {block.language for block in others} <= OTHER_LANGUAGES, page
        texts = [block.text for block in others if block.language == "text" and page != GENERATED]
        outside = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        texts += re.findall(r"^\n((?: {4}|\t).*)", outside, re.MULTILINE)
        assert [text for text in texts if begins.search(text)] == [], page


def test_commands_in_the_text_have_names_that_exist() -> None:
    named = {command for path in PAGES.values() for command in inline_commands(path, OURS)}
    assert named
    for command in sorted(named):
        command_lines.check_names(command)
    of_runbook = {
        command
        for page, path in PAGES.items()
        if page.startswith("docs/runbook/")
        for command in inline_commands(path, OURS)
    }
    assert of_runbook
    for command in sorted(of_runbook):  # an operator types them as they stand, with the values of the case
        command_lines.check(command.replace("UUID", str(UUID(int=1))))
    others = {command for path in PAGES.values() for command in inline_commands(path, OTHERS)}
    whole = {command for command in others if len(command.split()) > 2}
    assert whole
    for command in sorted(whole):
        command_lines.check(command)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("tidegate tier bonds", "No such command 'bonds'"),
        (".venv/bin/tidegate tier bounds --confg x", "No such option: --confg"),
        ("tidegate tier bounds orders:3", "expected TOPIC without a partition, not orders:3"),
        ("tidegate explain --config tidegate.toml", "target"),
        ("tidegate-pipeline usage --by week", "'week' is not one of"),
        ("A=b spark-submit --master yarn x/tidegate_pipeline.py usages", "No such command 'usages'"),
        ("spark-submit --mastre yarn x/tidegate_pipeline.py usage", "unknown option"),
        ("make domo", "No rule to make target 'domo'"),
        ("make demo ARGS=--kept", "unrecognized arguments: --kept"),
        ("python -m bench.backfill --store nowhere", "invalid choice: 'nowhere'"),
        ("python -m bench.nothing", "No module named 'bench.nothing'"),
        ("pip install '.[spark]'", "pyproject.toml has no extras spark"),
        ("pip install -r requirement.txt", "there is no such file"),
        ("docker compose --profile spork up", "invalid choice: 'spork'"),
        ("docker compose run --rm spark usage --by week", "'week' is not one of"),
        ("docker build --build-arg EXTRA=hdfs .", "the Dockerfile has no argument EXTRA"),
        ("docker build --build-arg EXTRAS=spark .", "pyproject.toml has no extras spark"),
        ("curl http://127.0.0.1:9190/api/v1/reload", "the admin port has no GET /api/v1/reload"),
        ("kubectl apply -f deploy/nowhere", "deploy/nowhere has no manifests"),
        ("helm install tidegate deploy/nowhere", "deploy/nowhere is no chart"),
        ("helm upgrade tidegate deploy/helm/tidegate -f deploy/nowhere.yaml", "there is no file deploy/nowhere.yaml"),
        ("kubectl exec tidegate-0 -- tidegate chek", "No such command 'chek'"),
        ("kafka-config.sh --alter", "no check knows the program kafka-config.sh"),
        ("tidegated serve", "no check knows the program tidegated"),
    ],
)
def test_a_wrong_command_is_found(command: str, why: str) -> None:
    with pytest.raises(WrongCommandError, match=re.escape(why)):
        command_lines.check(command)


@pytest.mark.parametrize(
    "text",
    [
        "tidegate tier bounds TOPIC:PARTITION",
        "tidegate tier bonds",
        "tidegate explain TOPIC [--ofset N]",
        "tidegate-pipeline spark",
        "make domo",
    ],
)
def test_a_wrong_name_in_the_text_is_found(text: str) -> None:
    with pytest.raises(WrongCommandError):
        command_lines.check_names(text)


def test_a_new_command_of_a_page_needs_an_entry(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nmake demo && tidegate \\\n  top  # both\n```\n1. Then:\n   ```sh\n   make test\n   ```\n")
    assert shell_commands(page) == ["make demo", "tidegate top", "make test"]
    for document, command in (("README.md", "tidegate tier bounds"), ("new.md", "make demo")):
        with pytest.raises(KeyError, match="does not say how this is tested"):
            how(document, command)
