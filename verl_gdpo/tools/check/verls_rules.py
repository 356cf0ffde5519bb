"""What verl itself says about a configuration, before it starts a worker."""

import os
import sys
from typing import Any

from omegaconf import OmegaConf

import verl_gdpo
from verl_gdpo.tools.check.findings import message_of
from verl_gdpo.tools.check.machine import check_device


def check_environment(config: Any) -> str:
    """Return the versions; raise ValueError if verl does not load us, or lacks a dependency."""
    try:
        from verl_gdpo.verl_hooks import for_check as verls
    except Exception as error:
        raise ValueError(f"verl cannot be imported: {message_of(error)}") from error
    plugin = sys.modules.get("verl_gdpo.plugin")
    if plugin is None:
        chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
        raise ValueError(
            f"verl {verls.VERSION} did not load verl-gdpo: VERL_USE_EXTERNAL_PLUGINS={chosen}, "
            f"VERL_USE_EXTERNAL_MODULES={os.environ.get('VERL_USE_EXTERNAL_MODULES')}. Set the "
            "latter to verl_gdpo.plugin, or name verl_gdpo in the former"
        )
    try:
        verls.import_parts(config)
    except ImportError as error:
        raise ValueError(
            f"{error.name} cannot be imported: {error}. verl's default trainer needs "
            "TransferQueue, fastapi, uvicorn and cachetools, which verl does not install; "
            "verl-gdpo does"
        ) from error
    if plugin.refusals:
        raise ValueError("verl-gdpo refuses to run: " + "; ".join(plugin.refusals))
    check_device(config.trainer.device)
    return f"verl {verls.VERSION}, verl-gdpo {verl_gdpo.__version__}"


def trains_critic(config: Any, _environment: str) -> bool:
    """Whether verl trains a critic."""
    from verl_gdpo.verl_hooks.for_check import trains_critic as trains

    return trains(config)


def validate(config: Any, _environment: str) -> list[str]:
    """Run verl's own validation and return the lines that it prints.

    Raises:
        Exception: the exception of verl for a wrong configuration.
    """
    from verl_gdpo.verl_hooks import for_check as verls

    printed = verls.what_validation_prints(config)
    verls.make_rollout_config_and_dataset_class(config)
    return printed


def check_trainer(config: Any, _plan: Any, _environment: str) -> str:
    """Return the trainer's name; raise ValueError if it refuses the configuration."""
    if not config.trainer.get("use_v1", False):
        return _check_legacy_trainer(config)
    from verl_gdpo.verl_hooks.for_check import make_v1_trainer

    _check_filter(config)
    mode = config.trainer.v1.trainer_mode
    try:
        make_v1_trainer(config)
    except Exception as error:
        raise ValueError(f"trainer.v1.trainer_mode={mode}: {message_of(error)}") from error
    return f"trainer {mode}"


def _check_filter(config: Any) -> None:
    wanted = OmegaConf.select(config, "algorithm.filter_groups")
    if wanted and wanted.enable and not wanted.metric:
        raise ValueError(
            "algorithm.filter_groups.enable=True with metric=null, which verl refuses. Set "
            "algorithm.filter_groups.metric=score; with adv_estimator=gdpo, this is its own rule"
        )


def _check_legacy_trainer(config: Any) -> str:
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        raise ValueError(
            "algorithm.filter_groups.enable=True with trainer.use_v1=False: verl's legacy trainer "
            "does not filter. Set trainer.use_v1=True, or filter_groups.enable=False"
        )
    return "legacy trainer"
