"""Generates `docs/configuration.md` from the settings models.

`python -m proxy.commands.config_reference > docs/configuration.md` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from proxy.config import TidegateConfig
from proxy.process.live_settings import is_live
from tiers.config.setting_keys import key_of, keys_of_field, own_fields
from tiers.config.settings import DurationMs, SizeBytes
from tiers.config.topic_policy import COPY_LAG_BYTES, COPY_LAG_MS, TierWork
from tiers.config.topic_settings import (
    COPY_DISABLE,
    DELETE_ON_DISABLE,
    LOCAL_RETENTION_BYTES,
    LOCAL_RETENTION_MS,
    REMOTE_STORAGE_ENABLE,
    TIER_DEFAULTS,
)
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES

INTRODUCTION = """\
# Configuration

Tidegate reads one TOML file: `tidegate serve --config FILE`. If a KIP names a key, Tidegate uses the same name. Those
keys stand at the top of the file, before the first section. An unknown key is an error.

A duration is a number of milliseconds, or a string with a unit (`"500ms"`, `"10s"`, `"5m"`, `"12h"`, `"7d"`). A size is
a number of bytes, or a string with a unit (`"64MiB"`, `"1GB"`). `docs/tidegate.example.toml` is a complete example.
`proxy/commands/config_reference.py` generates this page from the code.

SIGHUP applies some settings without a restart: each section below says which. See 'Changing settings' in
docs/day-to-day.md.

Without `--config`, every command reads the first of these files: the one that `TIDEGATE_CONFIG` names, `tidegate.toml`
in the working folder, and `/etc/tidegate/tidegate.toml`.

## Environment variables

An environment variable can set every setting, and takes precedence over the file. No file is needed if variables set
all that is required. The name is `TIDEGATE`, then the sections, then the key, each after two underscores, in capitals.
One underscore stands for each dot of a key. The entries of a list have numbers from 0 on, and the number after the last
one adds an entry.

* `TIDEGATE__UPSTREAM__BOOTSTRAP_SERVERS=kafka-1:9092,kafka-2:9092` sets `bootstrap.servers` in `[upstream]`.
* `TIDEGATE__REMOTE_LOG_READER_THREADS=20` sets `remote.log.reader.threads`, at the top of the file.
* `TIDEGATE__TOPICS__0__LOCAL_RETENTION_MS=6h` sets `local.retention.ms` in the first `[[topics]]`.
* `TIDEGATE__UPSTREAM__SASL__PASSWORD_FILE=/run/secrets/kafka` sets `password.file` in `[upstream.sasl]`.
* `TIDEGATE__STORAGE__BUCKET=tier` sets `bucket` in `[storage]`.

A value has the form that it has in the file: `true`, `20`, `["10.0.0.0/8"]`. Text needs no quotes. An unknown variable
that begins with `TIDEGATE__` is an error.

## Secrets

Instead of a secret, the configuration can name a file that has it: `password.file` for `password`. The same holds for
the keys of a store: `secret.access.key.file`. A line break at the end of the file does not count. For Spark jobs, the
files of a store's keys must exist on every executor.
"""


_TITLES = {
    "": "Top of the file",
    "storage.locations": "`[[storage.locations]]`",
    "topics": "`[[topics]]`",
}


TOPIC_SETTINGS = """
## Settings of one topic, through the proxy

A topic can have its own tier settings, which override those of the file, key by key. Set them with Kafka's own tools at
the proxy's address: `kafka-configs.sh --alter --topic TOPIC --add-config KEY=VALUE`. Values are plain numbers, `true`
or `false`. The file alone says how large and how old a remote segment is: `segment.bytes` and `segment.ms` in
`[[topics]]`. The topic's own keys of these names are those of the broker's log.

"""

_MEANINGS = {
    REMOTE_STORAGE_ENABLE: (
        "Whether to tier the topic. The change from true to false needs `remote.log.delete.on.disable=true`."
    ),
    LOCAL_RETENTION_MS: "How long the broker keeps copied records, in milliseconds. -2 stands for retention.ms.",
    LOCAL_RETENTION_BYTES: (
        "How many bytes of copied records the broker keeps per partition. -2 stands for retention.bytes."
    ),
    COPY_LAG_MS: (
        "Delays copies until the oldest record is that old, in milliseconds (KIP-1241). -1 stands for the local "
        "retention. Records are copied before they have used 40 % of a broker's retention that is not the total."
    ),
    COPY_LAG_BYTES: (
        "Delays copies until so many bytes lie behind the segment. -1 stands for the local retention. One of the two "
        "lags is enough, and 0 in one of them ends the delay."
    ),
    COPY_DISABLE: "Stops copying; copied records stay readable (KIP-950).",
    DELETE_ON_DISABLE: (
        "With `remote.storage.enable=false`: deletes all remote records of the topic (KIP-950). It has no key in "
        "`[[topics]]`, so no change of the file deletes anything. See 'Stop tiering a topic' in docs/day-to-day.md."
    ),
    RETENTION_MINUTES: (
        "The total retention over both tiers, in minutes. -1 is unlimited. -2: the broker's `retention.*` is the "
        "total. A shorter value deletes records. The key can only be removed while the broker's retention is not "
        "shorter. See 'Two retentions' in docs/day-to-day.md."
    ),
    RETENTION_BYTES: ("The same in bytes per partition. If only one of the two keys is set, the other is unlimited."),
    TierWork.COPYING.key: (
        "Pauses copying. `tidegate tier pause` sets this key and the next three: see 'Pause a topic' in "
        "docs/day-to-day.md."
    ),
    TierWork.TRIMMING.key: "Pauses trimming: the brokers keep copied records.",
    TierWork.EXPIRING.key: "Pauses expiring: no remote segment is deleted by retention.",
    TierWork.READING.key: "Pauses the reading of remote records: clients get an error that they retry.",
}


def reference() -> str:
    sections = (_section(name, model) for name, model in TidegateConfig.section_models().items())
    return INTRODUCTION + "".join(sections) + TOPIC_SETTINGS + _topic_settings()


def _topic_settings() -> str:
    lines = ["| Key | Default | Meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | `{default}` | {_MEANINGS[key]} |" for key, default in TIER_DEFAULTS.items()]
    return "\n".join(lines) + "\n"


def _section(name: str, model: type[BaseModel]) -> str:
    title = _TITLES.get(name, f"`[{name}]`")
    said = " ".join([*(model.__doc__ or "").split(), *_live(name, model)])
    lines = [f"\n## {title}\n", said, "", *_table(model)]
    if not name:
        lines += [_row(key, TidegateConfig.model_fields[key]) for key in TidegateConfig.keys_at_top()]
    return "\n".join(lines) + "\n"


def _live(name: str, model: type[BaseModel]) -> Iterator[str]:
    """Yields a sentence that says which keys of a section SIGHUP applies, if there are any."""
    if is_live(f"[[{name}]]"):
        yield "SIGHUP applies changes at once."
        return
    keys = [key_of(each, field) for each, field in own_fields(model).items()]
    live = [key for key in keys if is_live(f"[{name}] {key}" if name else key)]
    rest = [key for key in keys if key not in live]
    if len(rest) < len(live):
        yield f"SIGHUP applies changes at once, except those of {_listed(rest)}."
    elif live:
        yield f"SIGHUP applies changes of {_listed(live)} at once."


def _listed(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield "| Key | Default | Meaning |"
    yield "|---|---|---|"
    for name, field in own_fields(model).items():
        if name == "settings":
            yield f"| *others* | | {field.description} |"
        else:
            yield _row(name, field)


def _row(name: str, field: FieldInfo) -> str:
    key, *also = keys_of_field(name, field)
    meaning = f"{field.description}" + (f" Also: `{'`, `'.join(also)}`." if also else "")
    return f"| `{key}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "*required*" if field.is_required() else ""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value > 0:
        if field.metadata and _is(field, SizeBytes):
            return f"`{_largest(value, (('GiB', 1 << 30), ('MiB', 1 << 20), ('KiB', 1 << 10)))}`"
        if field.metadata and _is(field, DurationMs):
            return f"`{_largest(value, (('d', 86_400_000), ('h', 3_600_000), ('m', 60_000), ('s', 1_000)))}`"
        return f"`{value}`"
    return f"`{value}`" if isinstance(value, int | float) else f'`"{value}"`'


def _is(field: FieldInfo, annotated: object) -> bool:
    wanted = getattr(annotated, "__metadata__", ())
    return any(entry in wanted for entry in field.metadata)


def _largest(value: int, units: tuple[tuple[str, int], ...]) -> str:
    for unit, size in units:
        if value % size == 0:
            return f'"{value // size}{unit}"'
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(reference())
