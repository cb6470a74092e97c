"""`tidegate-pipeline warm`: compiles the decoder and keeps it, as for an image, so that no task waits for it."""

from __future__ import annotations

import typer

from pipeline.commands.common import findings
from pipeline.decode import arrow_records
from tiers.console import say


def warm() -> None:
    """Compiles the decoder ahead of the first job, for this user on this machine."""
    is_compiled = arrow_records.warm()
    if is_compiled:
        typer.echo("the decoder is compiled")
    else:
        say("numba cannot be used here: records are decoded by a slower decoder, which gives the same")
    findings(not is_compiled)
