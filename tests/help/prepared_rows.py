"""Prepares rows as `verl-gdpo data` does, and reads what it has written."""

from verl_gdpo.tasks.preparation.prepared_files import parquet_rows
from verl_gdpo.tools.data import main


def prepare(task, folder, *options):
    """(exit code, [rows for training, rows for validation]) in folder/out; None for no file."""
    try:
        code = main([task, "--out", str(folder / "out"), *map(str, options)])
    except SystemExit as stop:
        code = stop.code
    files = [folder / "out" / f"{split}.parquet" for split in ("train", "test")]
    return code, [[*parquet_rows(file)] if file.exists() else None for file in files]
