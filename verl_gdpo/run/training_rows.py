"""The data sources of a run's training rows, read before verl reads the rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
from omegaconf import OmegaConf


def training_sources(config: Any) -> set[str] | None:
    """Return the values of `data_source` in `data.train_files`; None if only verl can tell.

    That is so for a dataset class of the user, an address such as `hdfs://`, and a file that cannot
    be read, of which verl says why.
    """
    files = OmegaConf.select(config, "data.train_files")
    if not files or OmegaConf.select(config, "data.custom_cls.path"):
        return None
    found: set[str] = set()
    for file in [files] if isinstance(files, str) else files:
        try:
            found |= {*_column(Path(str(file)).expanduser()).unique().to_pylist()}
        except (OSError, KeyError, pa.ArrowException):
            return None
    return found


def _column(path: Path) -> Any:
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path, columns=["data_source"])["data_source"]
    return pa.json.read_json(path)["data_source"]
