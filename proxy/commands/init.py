"""`tidegate init`: writes a first `tidegate.toml` with comments, from options, and runs the check.

The command overwrites no file, and writes no secret: the file names where secrets come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from proxy.commands.check import checked
from proxy.config import TidegateConfig, load_config
from tiers.commands.console import say
from tiers.commands.quantities import duration_ms
from tiers.config.tier_config import ConfigError


class Store(StrEnum):
    S3 = "s3"
    HDFS = "hdfs"
    LOCAL = "local"


_NEEDED = {Store.S3: ("bucket",), Store.HDFS: ("url", "path"), Store.LOCAL: ("path",)}
_TAKEN = {**_NEEDED, Store.S3: ("bucket", "region", "endpoint.url")}
"""The settings of a store that are options."""


def _duration(text: str) -> str:
    """Returns a duration with its unit as it is. Raises `typer.BadParameter`."""
    duration_ms(text)
    return text


def init(
    bootstrap_servers: Annotated[
        str, typer.Option("--bootstrap-servers", help="Brokers, such as kafka-1:9092,kafka-2:9092.")
    ],
    advertised_host: Annotated[
        str, typer.Option("--advertised-host", help="The name by which clients reach this machine.")
    ],
    topics: Annotated[
        str, typer.Option("--topics", help="The topics to tier: one name, or one pattern such as orders-*.")
    ],
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("tidegate.toml"),
    bootstrap_port: Annotated[
        int, typer.Option("--bootstrap-port", min=1, max=65_535, help="The port at which clients begin.")
    ] = 9092,
    base_port: Annotated[
        int, typer.Option("--base-port", min=1, max=65_535, help="Clients reach broker N at this port + N.")
    ] = 9100,
    state: Annotated[
        str, typer.Option("--state", help="A folder of this proxy alone, on a local disk.")
    ] = "/var/lib/tidegate",
    store: Annotated[Store, typer.Option("--store", help="The store of the remote tier.")] = Store.S3,
    bucket: Annotated[str | None, typer.Option("--bucket", help="S3: the bucket. It must exist.")] = None,
    region: Annotated[str | None, typer.Option("--region", help="S3: the region.")] = None,
    endpoint_url: Annotated[
        str | None, typer.Option("--endpoint-url", help="S3: the address of a server that is not Amazon's.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="HDFS: hdfs://host:port.")] = None,
    path: Annotated[
        str | None, typer.Option("--path", help="HDFS or local: the folder of the remote tier. A local one must exist.")
    ] = None,
    local_retention: Annotated[
        str,
        typer.Option(
            "--local-retention", parser=_duration, help="How long the brokers keep copied records, such as 6h."
        ),
    ] = "6h",
    check: Annotated[bool, typer.Option("--check/--no-check", help="Run `tidegate check` with the file.")] = True,
) -> None:
    """Writes a first configuration file, and checks it.

    S3 needs --bucket too, HDFS --url and --path, a local store --path. Exit code 1: the check found a problem. Exit
    code 2: a problem lies in a setting. The file stays, unless Tidegate cannot read it."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder: name a file in it")
    if file.exists():
        raise ConfigError(f"{file} exists: name another file, or remove it")
    servers = [each.strip() for each in bootstrap_servers.split(",") if each.strip()]
    given = {"bucket": bucket, "region": region, "endpoint.url": endpoint_url, "url": url, "path": path}
    text = f"""\
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
advertised.host = {_string(advertised_host)}
bootstrap.port = {bootstrap_port}
base.port = {base_port}

[admin]                           # the page, /metrics, /livez, /servez, /readyz
host = "127.0.0.1"                # another address needs token.file
port = 9190

[state]
path = {_string(state)}    # one folder per proxy, on a local disk

[storage]
{_store(store, given)}

[[topics]]                        # the first rule that matches a topic decides
pattern = {_string(topics)}
local.retention.ms = {_string(local_retention)}         # the topic's retention.ms is the total over both tiers
segment.bytes = "256MiB"          # a segment is copied when it has this size,
segment.ms = "1h"                 # or this age

[log]
level = "info"
format = "text"                   # or "json"
"""
    config = write(file, text)
    say(f"{file} was written.")
    if check and (code := checked(config, file)):
        say(f"Correct {file}, and run: tidegate check --config {file}")
        raise typer.Exit(code)
    say(f"Start the proxy: tidegate serve --config {file}")


def write(file: Path, text: str) -> TidegateConfig:
    """Writes the file, and removes it again if Tidegate could not read it. Raises `ConfigError`, `OSError`."""
    with file.open("x", encoding="utf-8", errors="surrogateescape") as opened:
        opened.write(text)
    try:
        return load_config(file)
    except ConfigError:
        file.unlink()
        raise


def _store(store: Store, given: Mapping[str, str | None]) -> str:
    """Returns the section of the store. Raises `typer.BadParameter` if an option is missing, or is another store's."""
    if missing := [_option(key) for key in _NEEDED[store] if given[key] is None]:
        raise typer.BadParameter(f"--store {store} needs {' and '.join(missing)}")
    if others := [_option(key) for key, value in given.items() if value is not None and key not in _TAKEN[store]]:
        raise typer.BadParameter(f"--store {store} takes no {' or '.join(others)}")
    lines = [f"implementation = {_string(store)}"]
    lines += [f"{key} = {_string(value)}" for key, value in given.items() if value is not None]
    if store is Store.S3:
        lines += ["path.style = true"] if given["endpoint.url"] else []
        lines += [
            "# Without the next keys, the credentials come from the AWS chain: environment, profile, instance.",
            '# access.key.id = "..."',
            '# secret.access.key.file = "/etc/tidegate/s3-secret"',
        ]
    return "\n".join(lines)


def _option(key: str) -> str:
    return f"--{key.replace('.', '-')}"


def _string(text: str) -> str:
    """Returns a TOML string. JSON's escapes are TOML's."""
    return json.dumps(text, ensure_ascii=False)


def _array(texts: list[str]) -> str:
    return f"[{', '.join(map(_string, texts))}]"
