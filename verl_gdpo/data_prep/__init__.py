"""Data preparation: makes the parquet files that verl trains on. `tools/data.py` is its command.

One file per task says where its rows come from; `schema.py` says what a row is.
"""


class DataError(Exception):
    """Something the user can put right. The message names what, where, got and expected."""


class UsageError(DataError):
    """Options that do not go together."""


class LeftOut(Exception):
    """A row that is not to be used, and is no mistake. The message says why, for the report."""
