"""Data preparation: `python -m data_prep TASK --out DIR` writes the parquet files verl trains on.

One file per task says where its rows come from; `schema.py` says what a row is.
"""


class DataError(Exception):
    """Something the user can put right. The message names what, where, got and expected."""


class UsageError(DataError):
    """Options that do not go together."""
