"""Makes the parquet files that verl trains on. The command is in `tools/data.py`.

`schema.py` says what a row is. A task with its own source of rows has a file here.
"""


class DataError(Exception):
    """An error that the user can correct. The message names what, where, got and expected."""


class UsageError(DataError):
    """The user combined options that exclude each other."""


class LeftOut(Exception):
    """A row, or a test of one, is left out. The message says why, for the report."""
