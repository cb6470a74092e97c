"""Parses the commands of documents, and runs none of them: an unknown program, subcommand or option is an error.

Programs of ours are parsed by their own parsers. `make` shows which program a target starts with which arguments.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest import mock
from urllib.parse import urlsplit

import typer
import yaml

from pipeline import cli as pipeline_cli
from proxy import cli as proxy_cli
from proxy.admin.api import openapi
from tests.support.clients.kafka_tools import TOOLS
from tests.support.repository import ROOT
from tiers.commands.console import CONFIG_VARIABLE

Words = Sequence[str]


class WrongCommandError(ValueError):
    """A command that its program would refuse. The message says why."""


def check(command: str) -> None:
    """Parses a command line, which may set variables of the environment. Raises `WrongCommandError`.

    `OFFSET` stands for any offset."""
    words = ["0" if word == "OFFSET" else word for word in shlex.split(command)]
    while re.match(r"\w+=", words[0]):
        del words[0]
    program = Path(words[0]).name
    checker = PROGRAMS.get(program.removesuffix(".sh"))
    if checker is None:
        raise WrongCommandError(f"{command}: no check knows the program {program}")
    try:
        checker(words[1:])
    except WrongCommandError as wrong:
        raise WrongCommandError(f"{command}: {wrong}") from None


def check_names(text: str) -> None:
    """Looks up the names in the synopsis of a command of ours: subcommands, options, a target of make.

    Raises `WrongCommandError`. Arguments may be missing, alternative or placeholders."""
    program, *words = re.sub(r"[][|]", " ", text).split()
    if Path(program).name == "make":
        for target in (word for word in words if "=" not in word):
            need(re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), text)
        return
    command = _command(Path(program).name)
    for word in words:
        if word.startswith("--"):
            need(word in {option for parameter in command.params for option in parameter.opts}, f"{text}: {word}")
        elif hasattr(command, "commands"):
            need(word in command.commands, f"{text}: {word}")
            _, command, _ = command.resolve_command(typer.Context(command), [word])
        elif ":" in word:
            need(_takes_partition(command), f"{text}: expected TOPIC without a partition, not {word}")


def _takes_partition(command: Any) -> bool:
    return any(":" in (each.metavar or "") for each in command.params if each.param_type_name == "argument")


def need(is_right: object, otherwise: str) -> None:
    if not is_right:
        raise WrongCommandError(otherwise)


def tidegate(words: Words) -> None:
    _parse("tidegate", _command("tidegate"), words)


def tidegate_pipeline(words: Words) -> None:
    _parse("tidegate-pipeline", _command("tidegate-pipeline"), words)


@cache
def _command(program: str) -> Any:
    return typer.main.get_command({"tidegate": proxy_cli.app, "tidegate-pipeline": pipeline_cli.app}[program])


def _parse(name: str, command: Any, words: Words) -> None:
    for parameter in command.params:
        if parameter.is_eager:
            parameter.callback = None  # it would act at once: print the version, or install a completion
    try:
        with mock.patch.dict(os.environ, {CONFIG_VARIABLE: "tidegate.toml"}):
            context = command.make_context(name, list(words))
        topic = context.params.get("topic")
        if isinstance(topic, str) and ":" in topic:
            need(_takes_partition(command), f"expected TOPIC without a partition, not {topic}")
        rest = [*context._protected_args, *context.args]
        if rest and hasattr(command, "commands"):
            name, command, rest = command.resolve_command(context, rest)
            _parse(name, command, rest)
    except Exception as wrong:
        need(not hasattr(wrong, "format_message"), str(wrong))  # typer publishes no class of its errors
        raise


class _ParsedError(Exception):
    """The arguments of a program are right, and the program does not go on."""


def python(words: Words) -> None:
    """Calls the `main` of a module, which ends when it has parsed its arguments."""
    need(words[:1] == ["-m"], "expected -m MODULE")
    name, *arguments = words[1:]
    try:
        module = importlib.import_module(name)
        if not hasattr(module, "main"):
            module = importlib.import_module(f"{name}.__main__")
    except ModuleNotFoundError as missing:
        raise WrongCommandError(str(missing)) from None
    need("parse_args(" in inspect.getsource(module), f"{name} has no parser of arguments")
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise _ParsedError

    parser: dict[str, Any] = {"parse_args": parse_and_end, "error": _Parser.error}
    with mock.patch.multiple(argparse.ArgumentParser, **parser), mock.patch("sys.argv", [name, *arguments]):
        try:
            module.main()
        except _ParsedError:
            return
    raise WrongCommandError(f"{name} parsed no arguments")


def make(words: Words) -> None:
    """Asks make what it would run, and parses our programs in that.

    The variables of a make that runs the tests (`make test ARGS=...`) do not apply."""
    environ = {"PATH": os.environ["PATH"]}
    shown = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=environ
    )
    need(shown.returncode == 0, shown.stderr.strip())
    for line in shown.stdout.splitlines():
        if re.match(r"\.venv/bin/python -m bench\b", line):
            python(shlex.split(line)[1:])


def pip(words: Words) -> None:
    need(words[:1] == ["install"], "expected install")
    options = {word for word in words if word.startswith("-")}
    need(options <= {"--require-hashes", "-r", "--no-deps", "--no-build-isolation", "--force-reinstall"}, f"{options}")
    for extras in re.findall(r"\.\[(.+?)\]", " ".join(words)):
        _need_extras(extras)
    if "-r" in words:
        need((ROOT / words[words.index("-r") + 1]).is_file(), "there is no such file")


def _need_extras(extras: str) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    need(set(extras.split(",")) <= set(known), f"pyproject.toml has no extras {extras}")


SPARK_OPTIONS: Final = {"--master", "--deploy-mode", "--py-files", "--files", "--archives", "--conf"}


def spark_submit(words: Words) -> None:
    (program,) = [number for number, word in enumerate(words) if word.endswith("/tidegate_pipeline.py")]
    need({word for word in words[:program] if word.startswith("-")} <= SPARK_OPTIONS, "unknown option")
    tidegate_pipeline(words[program + 1 :])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongCommandError(message)


def docker(words: Words) -> None:
    if words[0] == "build":
        arguments = [words[number + 1] for number, word in enumerate(words) if word == "--build-arg"]
        for name, _, value in (argument.partition("=") for argument in arguments):
            need(f"\nARG {name}=" in (ROOT / "Dockerfile").read_text(), f"the Dockerfile has no argument {name}")
            if name == "EXTRAS":
                _need_extras(value)
        return
    if words[0] == "push":
        return
    need(words[0] == "compose", f"expected build, push or compose, not {words[0]}")
    parser = _Parser()
    parser.add_argument("--profile", choices=sorted(_profiles()))
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("up").add_argument("--build", action="store_true")
    run = commands.add_parser("run")
    run.add_argument("--rm", action="store_true")
    run.add_argument("service", choices=sorted(_services()))
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(words[1:])
    if given.command == "run":
        (program,) = _services()[given.service]["entrypoint"]
        check(shlex.join([program, *given.arguments]))
    if _has_compose():
        profile = ["--profile", given.profile] if given.profile else []
        command = ["docker", "compose", *profile, "config", "--quiet"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        need(shown.returncode == 0, shown.stderr.strip())


@cache
def _services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return services


def _profiles() -> set[str]:
    return {profile for service in _services().values() for profile in service.get("profiles", ())}


@cache
def _has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False)
    return asked.returncode == 0


def kubectl(words: Words) -> None:
    """The commands that a program starts in a pod are parsed by that program."""
    if words[0] == "exec":
        program = words[list(words).index("--") + 1 :]
        if program[0] != "sh":
            check(shlex.join(program))
        return
    if words[0] in ("describe", "create", "annotate", "logs", "port-forward", "rollout"):
        return
    need(words[:2] == ["apply", "-f"], "expected apply -f, exec, or a command without files")
    manifests = sorted((ROOT / words[2]).glob("*.yaml"))
    need(manifests, f"{words[2]} has no manifests")
    for manifest in manifests:
        need(all(each["kind"] for each in yaml.safe_load_all(manifest.read_text())), f"{manifest} has no kind")


def helm(words: Words) -> None:
    if words[0] == "test":
        return
    need(words[0] in ("install", "upgrade"), "expected install, upgrade or test")
    need((ROOT / words[2] / "Chart.yaml").is_file(), f"{words[2]} is no chart")
    files = [words[number + 1] for number, word in enumerate(words) if word == "-f"]
    for file in files:
        need(file == "values.yaml" or (ROOT / file).is_file(), f"there is no file {file}")


def curl(words: Words) -> None:
    """The address is one of the admin port."""
    path = urlsplit(words[-1]).path
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    need(method.lower() in openapi("")["paths"].get(path, {}), f"the admin port has no {method} {path}")


def kafka_tool(_: Words) -> None:
    """Kafka's tools parse in a process of Java only: tests on a real Kafka run them."""


def other(_: Words) -> None:
    """A program that has nothing of ours."""


PROGRAMS: Final[dict[str, Callable[[Words], None]]] = {
    "tidegate": tidegate,
    "tidegate-pipeline": tidegate_pipeline,
    "python": python,
    "python3": python,
    "make": make,
    "pip": pip,
    "spark-submit": spark_submit,
    "docker": docker,
    "kubectl": kubectl,
    "helm": helm,
    "curl": curl,
    **dict.fromkeys(TOOLS, kafka_tool),
    **dict.fromkeys(("git", "cd", "install", "mkdir", "rm", "systemctl", "systemd-run", "useradd", "venv-pack"), other),
}
