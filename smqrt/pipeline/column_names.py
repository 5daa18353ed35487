"""Names of columns as Spark wants them: `service.name` without quotes is a field of a struct to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column


def quoted(name: str) -> str:
    """Returns the name of one column in backquotes, so that dots, blanks and backquotes in it are only characters."""
    return "`" + name.replace("`", "``") + "`"


def column(name: str) -> Column:
    """Returns the column of exactly this name."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))
