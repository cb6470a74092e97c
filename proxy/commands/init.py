"""`tidegate init`: writes a first `tidegate.toml` with comments, from a few answers or options, and runs the check.

On a terminal it asks for what no option says. Elsewhere, a missing option without a default is an error. The command
overwrites no file, and writes no secret: the file names where secrets come from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from proxy.commands.check import checked
from proxy.config import TidegateConfig, load_config
from tiers.commands.console import say
from tiers.config.tier_config import ConfigError, parse_config_text


class Store(StrEnum):
    S3 = "s3"
    HDFS = "hdfs"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Answers:
    """What the file says. `bucket`, `region` and `endpoint_url` are for S3, `url` for HDFS, `path` for HDFS and local.

    An empty `endpoint_url` stands for Amazon's own. The defaults are valid, so that a program can check one answer."""

    bootstrap_port: int
    base_port: int
    store: Store
    bootstrap_servers: str = "localhost:9092"
    advertised_host: str = "localhost"
    state: str = "/var/lib/tidegate"
    topics: str = "*"
    local_retention: str = "6h"
    bucket: str = ""
    region: str = ""
    endpoint_url: str = ""
    url: str = ""
    path: str = ""

    def with_answer(self, name: str, answer: str) -> Answers:
        change: dict[str, Any] = {name: answer}
        return replace(self, **change)


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("tidegate.toml"),
    bootstrap_servers: Annotated[
        str | None, typer.Option("--bootstrap-servers", help="Brokers, such as kafka-1:9092,kafka-2:9092.")
    ] = None,
    advertised_host: Annotated[
        str | None, typer.Option("--advertised-host", help="The name by which clients reach this machine.")
    ] = None,
    bootstrap_port: Annotated[
        int, typer.Option("--bootstrap-port", min=1, max=65_535, help="The port at which clients begin.")
    ] = 9092,
    base_port: Annotated[
        int, typer.Option("--base-port", min=1, max=65_535, help="Clients reach broker N at this port + N.")
    ] = 9100,
    state: Annotated[str | None, typer.Option("--state", help="A folder of this proxy alone, on a local disk.")] = None,
    store: Annotated[Store | None, typer.Option("--store", help="The store of the remote tier.")] = None,
    bucket: Annotated[str | None, typer.Option("--bucket", help="S3: the bucket. It must exist.")] = None,
    region: Annotated[str | None, typer.Option("--region", help="S3: the region.")] = None,
    endpoint_url: Annotated[
        str | None, typer.Option("--endpoint-url", help="S3: the address of a server that is not Amazon's.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="HDFS: hdfs://host:port.")] = None,
    path: Annotated[str | None, typer.Option("--path", help="HDFS or local: the folder of the remote tier.")] = None,
    topics: Annotated[
        str | None, typer.Option("--topics", help="The topics to tier: a name, or a pattern such as orders-*.")
    ] = None,
    local_retention: Annotated[
        str | None, typer.Option("--local-retention", help="How long the brokers keep copied records, such as 6h.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Run `tidegate check` with the file.")] = True,
) -> None:
    """Writes a first configuration file, and checks it.

    Asks on a terminal for what no option says. Exit code 1: the check found a problem. The file stays then."""
    if file.exists():
        raise ConfigError(f"{file} exists: name another file, or remove it")
    ask = _Questions(sys.stdin.isatty() and sys.stdout.isatty())
    chosen = Store(ask("--store", store, "Store of the remote tier (s3, hdfs, local)", "s3", among=[*Store]))
    foreign = {
        "--bucket": bucket if chosen is not Store.S3 else None,
        "--region": region if chosen is not Store.S3 else None,
        "--endpoint-url": endpoint_url if chosen is not Store.S3 else None,
        "--url": url if chosen is not Store.HDFS else None,
        "--path": path if chosen is Store.S3 else None,
    }
    if said := [option for option, value in foreign.items() if value is not None]:
        raise typer.BadParameter(f"--store {chosen} has no {' and no '.join(said)}")
    answers = Answers(bootstrap_port=bootstrap_port, base_port=base_port, store=chosen)

    def asked(key: str, option: str, value: str | None, question: str, default: str | None = None) -> None:
        """Adds an answer. On a terminal it asks again until Tidegate can read a file with the answer.

        Raises `ConfigError` if it cannot read a file with the value of the option."""
        nonlocal answers

        def mistake_in(answer: str) -> str | None:
            return mistake_of(answers.with_answer(key, answer), "the answer")

        if value is not None:
            refuse(mistake_of(answers.with_answer(key, value), option))
        answers = answers.with_answer(key, ask(option, value, question, default, mistake_in=mistake_in))

    asked("bootstrap_servers", "--bootstrap-servers", bootstrap_servers, "Brokers (host:port, ...)")
    asked("advertised_host", "--advertised-host", advertised_host, "Name of this machine, for clients")
    asked("state", "--state", state, "Folder for the state of this proxy", "/var/lib/tidegate")
    asked("topics", "--topics", topics, "Topics to tier (a name or a pattern)")
    asked("local_retention", "--local-retention", local_retention, "How long brokers keep copied records", "6h")
    match chosen:
        case Store.S3:
            asked("bucket", "--bucket", bucket, "Bucket, which must exist")
            asked("region", "--region", region, "Region", "us-east-1")
            answers = replace(answers, endpoint_url=endpoint_url or "")
            refuse(mistake_of(answers, "--endpoint-url"))
        case Store.HDFS:
            asked("url", "--url", url, "Address of the NameNode (hdfs://host:port)")
            asked("path", "--path", path, "Folder of the remote tier")
        case Store.LOCAL:
            asked("path", "--path", path, "Folder of the remote tier")
    write(file, answers)
    say(f"{file} was written.")
    if check and (code := checked(load_config(file), file)):
        say(f"Correct {file}, and run: tidegate check --config {file}")
        raise typer.Exit(code)
    say(f"Start the proxy: tidegate serve --config {file}")


class _Questions:
    """Asks for a value that no option says. Raises `ConfigError` without a terminal."""

    def __init__(self, is_interactive: bool) -> None:
        self._is_interactive = is_interactive

    def __call__(
        self,
        option: str,
        value: str | None,
        question: str,
        default: str | None = None,
        *,
        among: Collection[str] | None = None,
        mistake_in: Callable[[str], str | None] = lambda _: None,
    ) -> str:
        """Returns the value of the option, or an answer that is one of `among` and has no mistake."""
        if value is not None:
            return value
        if not self._is_interactive:
            if default is not None:
                return default
            raise ConfigError(f"there is no terminal to ask at: say {option}")
        while True:
            answer = str(typer.prompt(question, default=default)).strip()
            if among is not None and answer not in among:
                say(f"Answer one of: {', '.join(among)}.")
            elif (mistake := mistake_in(answer)) is not None:
                say(mistake)
            else:
                return answer


def mistake_of(answers: Answers, source: str) -> str | None:
    """Returns why Tidegate could not read a file with the answers. None: it can. The message begins with `source`."""
    try:
        text = text_of(answers)
        text.encode()
        parse_config_text(text, TidegateConfig, source)
    except UnicodeEncodeError:
        return f"{source}: it has bytes that are no text"
    except ConfigError as error:
        return str(error)
    return None


def refuse(mistake: str | None) -> None:
    if mistake is not None:
        raise ConfigError(mistake)


def write(file: Path, answers: Answers) -> None:
    """Writes the file, and removes it again if Tidegate could not read it. Raises `ConfigError`, `OSError`."""
    content = text_of(answers).encode()
    with file.open("xb") as opened:
        opened.write(content)
    try:
        load_config(file)
    except ConfigError:
        file.unlink()
        raise


def text_of(answers: Answers) -> str:
    servers = [each.strip() for each in answers.bootstrap_servers.split(",") if each.strip()]
    return f"""\
# Written by `tidegate init`. docs/configuration.md describes every key. Keys with Kafka's own names come first, before
# the first section, for example:
# remote.log.manager.task.interval.ms = "30s"

[upstream]
bootstrap.servers = {_array(servers)}    # some brokers are enough: Tidegate finds the others
# docs/first-start.md, "Rights", lists the rights that the proxy needs. `tidegate check` names the missing ones.
# [upstream.sasl]
# mechanism = "SCRAM-SHA-512"
# username = "tidegate"
# password.file = "/etc/tidegate/kafka-password"

[listener]                        # clients reach broker N at base.port + N
host = "0.0.0.0"
advertised.host = {_string(answers.advertised_host)}
bootstrap.port = {answers.bootstrap_port}
base.port = {answers.base_port}

[admin]                           # the page, /metrics, /livez, /servez, /readyz
host = "127.0.0.1"                # another address needs token.file
port = 9190

[state]
path = {_string(answers.state)}    # one folder per proxy, on a local disk

[storage]
{_store(answers)}

[[topics]]                        # the first rule that matches a topic decides
pattern = {_string(answers.topics)}
local.retention.ms = {_time(answers.local_retention)}         # the topic's retention.ms is the total over both tiers
segment.bytes = "256MiB"          # a segment is copied when it has this size,
segment.ms = "1h"                 # or this age

[log]
level = "info"
format = "text"                   # or "json"
"""


def _store(answers: Answers) -> str:
    match answers.store:
        case Store.S3:
            lines = [
                'implementation = "s3"',
                f"bucket = {_string(answers.bucket)}    # must exist",
                f"region = {_string(answers.region)}",
            ]
            if answers.endpoint_url:
                lines += [f"endpoint.url = {_string(answers.endpoint_url)}", "path.style = true"]
            return "\n".join(
                [
                    *lines,
                    "# Without the next keys, the credentials come from the AWS chain: environment, profile, instance.",
                    '# access.key.id = "..."',
                    '# secret.access.key.file = "/etc/tidegate/s3-secret"',
                ]
            )
        case Store.HDFS:
            return f'implementation = "hdfs"\nurl = {_string(answers.url)}\npath = {_string(answers.path)}'
        case Store.LOCAL:
            return (
                'implementation = "local"         # for one machine, or for a file system that all proxies mount\n'
                f"path = {_string(answers.path)}    # must exist"
            )


def _time(text: str) -> str:
    return text if text.isdecimal() else _string(text)


def _string(text: str) -> str:
    """Returns a TOML string. JSON's escapes are TOML's."""
    return json.dumps(text, ensure_ascii=False)


def _array(texts: list[str]) -> str:
    return f"[{', '.join(map(_string, texts))}]"
