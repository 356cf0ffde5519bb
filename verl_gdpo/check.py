"""Checks a whole training configuration before anything is started: no Ray, no GPU, no model.

verl-gdpo check [--config-dir recipes] [--config-name train] [key=value ...]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import ListConfig
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.rewards import check_ground_truths
from verl_gdpo.settings import settings_of_run, uses_gdpo_manager


def compose_config(config_dir: Path, config_name: str, overrides: list[str]) -> Any:
    """The configuration that `verl.trainer.main_ppo --config-dir ... --config-name ...` sees."""
    with initialize_config_dir(str(config_dir.resolve()), version_base=None):
        verls = "hydra.searchpath=[pkg://verl.trainer.config]"
        return compose(config_name, overrides=[verls, *overrides])


def check(config: Any) -> list[str]:
    """Raise ValueError or AssertionError at the first thing that cannot work; return remarks."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, need_reference_policy(config), need_critic(config))
    settings = settings_of_run(config)
    if settings is None:
        raise ValueError(
            "neither algorithm.adv_estimator nor reward.reward_manager.name is gdpo, so verl-gdpo "
            f"takes no part: got {config.algorithm.adv_estimator}, "
            f"{config.reward.reward_manager.name}"
        )
    remarks: list[str] = []
    sources: set[str] | None = set()  # of the training rows; None if some are out of reach
    for key in ("train_files", "val_files"):
        files = config.data[key]
        for file in files if isinstance(files, list | ListConfig) else [files]:
            table = check_data_file(config, key, file)
            rows = "not looked at" if table is None else f"{table.num_rows} rows"
            remarks.append(f"data.{key}: {rows} in {file}")
            if key == "train_files":
                new = None if table is None else {*table["data_source"].to_pylist()}
                sources = None if sources is None or new is None else sources | new
    settings = settings_of_run(config, sources)
    return [f"adv_estimator={config.algorithm.adv_estimator}, {settings}", *remarks]


def check_data_file(config: Any, key: str, file: str) -> pa.Table | None:
    """A parquet file, after a look at each row; None for a remote one (hdfs://), left to verl."""
    if "://" in file:
        return None
    if not Path(file).exists():
        raise ValueError(f"data.{key}: {file} does not exist")
    needed = [config.data.prompt_key, "data_source", "reward_model"]
    table = pq.read_table(file)
    absent = sorted({*needed} - {*table.column_names})
    if absent:
        raise ValueError(f"data.{key}: {file} lacks the columns {absent}")
    if uses_gdpo_manager(config) and config.reward.custom_reward_function.path is None:
        rows = table.select(["data_source", "reward_model"]).to_pylist()
        check_ground_truths(rows, f"data.{key} {file}")
    return table


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="verl-gdpo check", description=__doc__.splitlines()[0])
    parser.add_argument("--config-dir", type=Path, default=Path("recipes"))
    parser.add_argument("--config-name", default="train")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    try:
        config = compose_config(arguments.config_dir, arguments.config_name, arguments.overrides)
        remarks = check(config)
    except (ValueError, AssertionError, HydraException, OmegaConfBaseException) as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"check: {remark}" for remark in remarks))
    return 0
