"""What a user is told of whatever ended a command, in one line, and the exit code."""

from __future__ import annotations

import re
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException, PySparkRuntimeError

from pipeline.chosen_partitions import NothingChosenError
from pipeline.export.schema_error import ValueSchemaError
from pipeline.export.target import TargetError
from pipeline.job import JobError, spark_cause
from pipeline.session import SparkMasterError, SparkSettingError
from tiers.console import FAILED, MISUSED, explained

_USERS_OWN: Final = ("OptionError: ", "ConfigError: ")
_SAYS_ALL: Final = re.compile(
    r"\b(?:Option|Config|RemoteTier|RemoteLog|RemoteLogMetadata|(?:Retriable)?RemoteStorage|Broker(?:Refused)?"
    r"|CorruptSegment)Error: "
)
"""Our classes whose message needs no name before it; what happens in Spark's processes comes as text."""


def explain(error: Exception) -> tuple[str, int]:
    match error:
        case ExceptionGroup(exceptions=(only,)):
            return explain(only)
        case SparkSettingError() | NothingChosenError() | TargetError() | ValueSchemaError():
            said, code = str(error), MISUSED
        case AnalysisException():
            # Where a data source's Python failed, Spark says this too.
            said = spark_cause(error)
            code = FAILED if "Traceback" in str(error) and not said.startswith(_USERS_OWN) else MISUSED
        case PySparkRuntimeError() if error.getCondition() == "JAVA_GATEWAY_EXITED":
            said = "Spark does not start; why is above. It needs Java 17 or newer, by JAVA_HOME or on the path"
            code = FAILED
        case PySparkException() | Py4JError():
            said = spark_cause(error)
            if "stopped SparkContext" in said:
                said = "Spark has ended: its master, or somebody, ended the application; the master's log says why"
            code = MISUSED if said.startswith(_USERS_OWN) else FAILED
        case JobError() | SparkMasterError():
            said, code = str(error), FAILED
        case _:
            said, code = explained(error)
            said = said.replace("Value error, ", "")  # typer says so of a choice that there is not
    return _SAYS_ALL.sub("", said), code
