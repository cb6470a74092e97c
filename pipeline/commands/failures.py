"""`explain`: turns the exception that ended a command into one line for the user and an exit code."""

from __future__ import annotations

import re
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException, PySparkRuntimeError

from pipeline.chosen_partitions import NothingChosenError
from pipeline.export.schema_error import ValueSchemaError
from pipeline.export.target import TargetError
from pipeline.source.options import OptionError
from pipeline.spark.job import spark_cause
from pipeline.spark.session import SparkMasterError, SparkSettingError
from tiers.commands.console import FAILED, MISUSED, explained
from tiers.upkeep.runner import JobError

_USERS_OWN: Final = ("OptionError: ", "ConfigError: ")
_SAYS_ALL: Final = re.compile(
    r"\b(?:Option|Config|RemoteTier|RemoteLog|RemoteLogMetadata|(?:Retriable)?RemoteStorage|Broker(?:Refused)?"
    r"|CorruptSegment)Error: "
)
"""Names of our own error classes. Their messages need no class name in front. Errors from Spark's processes arrive as
text, so the names are removed from text."""


def explain(error: Exception) -> tuple[str, int]:
    match error:
        case ExceptionGroup(exceptions=(only,)):
            return explain(only)
        case SparkSettingError() | NothingChosenError() | OptionError() | TargetError() | ValueSchemaError():
            said, code = str(error), MISUSED
        case AnalysisException():
            # Spark also raises AnalysisException when the Python code of a data source fails.
            said = spark_cause(error)
            code = FAILED if "Traceback" in str(error) and not said.startswith(_USERS_OWN) else MISUSED
        case PySparkRuntimeError() if error.getCondition() == "JAVA_GATEWAY_EXITED":
            said = "Spark did not start; its own error is above. It needs Java 17 or newer, in JAVA_HOME or on the PATH"
            code = FAILED
        case PySparkException() | Py4JError():
            said = spark_cause(error)
            if "stopped SparkContext" in said:
                said = "Spark stopped: its master or a user ended the application; the master's log says why"
            code = MISUSED if said.startswith(_USERS_OWN) else FAILED
        case JobError() | SparkMasterError():
            said, code = str(error), FAILED
        case _:
            said, code = explained(error)
    return _SAYS_ALL.sub("", said), code
