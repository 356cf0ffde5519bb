"""What a plain verl command left: verl's own configuration and GRPO, no recipe and no verl-gdpo.

plain_verl_archive.tar.gz has the run of three minutes without a GPU: its metrics in two trackers,
two of its dumps, Hydra's folder and the reward function. Commit 2b3d27f has the program that
trained and packed it.
"""

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).with_name("plain_verl_archive.tar.gz")
METRICS = "plain/grpo_baseline.jsonl"
TENSORBOARD = "tensorboard_log/plain/grpo_baseline"
DUMPS = "dumps"
SCORER = "my_rewards.py:compute_score"


def unpack(folder):
    """The run as it was, in `folder`."""
    with tarfile.open(ARCHIVE) as archive:
        # as an attribute it harms no Python that lacks filters, such as 3.11.2
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder
