"""Downloads the model of a configuration from its hub, before a training starts.

verl-gdpo fetch [what stands behind `python -m verl.trainer.main_ppo`]

Nothing is done where the model is a folder, or is complete in the hub's cache. HF_ENDPOINT names
another hub, HF_HOME another cache.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from verl_gdpo.tools.compose import add_config_arguments, compose_arguments

# the weights once, as safetensors; no other framework's
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")


def main(argv: Sequence[str]) -> int:
    """Download what is missing and print its folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="verl-gdpo fetch", description=str(__doc__))
    add_config_arguments(parser)
    config = compose_arguments(parser.parse_args(argv))
    path = str(config.actor_rollout_ref.model.path)
    if Path(path).expanduser().is_dir():
        print(Path(path).expanduser())
        return 0
    try:
        print(snapshot_download(path, allow_patterns=list(PATTERNS)))
    except Exception as error:  # of the network, the hub or the disk, in many classes
        reason = " ".join(str(error).split())
        print(
            f"fetch: actor_rollout_ref.model.path={path} cannot be downloaded: "
            f"{type(error).__name__}: {reason}. Without a network, name the folder of a model: "
            "actor_rollout_ref.model.path=FOLDER",
            file=sys.stderr,
        )
        return 1
    return 0
