"""`tidegate-pipeline warm`: compiles the decoder and keeps the code, for example in an image, so that no task waits."""

from __future__ import annotations

import typer

from pipeline.commands.common import findings
from pipeline.decode import arrow_records
from tiers.commands.console import say


def warm() -> None:
    """Compiles the decoder ahead of the first job, for this user on this machine."""
    is_compiled = arrow_records.warm()
    if is_compiled:
        typer.echo("the decoder is compiled")
    else:
        say("numba cannot be loaded: a slower decoder with the same results decodes the records")
    findings(not is_compiled)
