"""What the rows of a run say of how they are scored, before a model is loaded.

Relies on verl 0.9: `RLHFDataset.dataframe` is a table of Hugging Face's `datasets`.
"""

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
    sources: set[Any] = set()
    for file in [files] if isinstance(files, str) else files:
        path = Path(str(file)).expanduser()
        try:
            if path.suffix == ".parquet":
                table = pa.parquet.read_table(path, columns=["data_source"])
            else:  # texts may be gigabytes
                schema = pa.schema([("data_source", pa.string())])
                alone = pa.json.ParseOptions(schema, unexpected_field_behavior="ignore")
                table = pa.json.read_json(path, parse_options=alone)
            sources |= {*table["data_source"].unique().to_pylist()}
        except (OSError, KeyError, pa.ArrowException):
            return None
    return None if None in sources else sources


def scored_rows(dataset: Any) -> Any | None:
    """Return the columns that say how rows are scored; None for a dataset without such a table."""
    table = getattr(dataset, "dataframe", None)
    columns = ["data_source", "reward_model"]
    has_them = {*columns} <= {*getattr(table, "column_names", ())}
    return table.select_columns(columns) if has_them else None  # type: ignore[union-attr]
