"""Gives the metrics that TRL logs the names of verl and verl-gdpo, under which all tools read them.

Relies on TRL 1.16, for the names in `GRPOTrainer.log`, and on transformers 5: `log_history` in
trainer_state.json, and the beginnings `train/` and `eval/` in tensorboard and W&B.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from verl_gdpo.run.folder import Metrics, finite_or_nan, merged

STATE = "trainer_state.json"  # of a checkpoint, or of `trainer.save_state()`
REWARD = re.compile(r"rewards/(.+)/mean")
PREFIX = re.compile(r"^(train/|eval/|eval_)")  # the last one in the trainer's own history
NAMES = {
    "reward": "critic/score/mean",
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "entropy": "actor/entropy",
    "kl": "actor/kl_loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
}
STEP = "train/global_step"  # in W&B, whose own steps count log entries
OF_A_TRAINER = ("loss", "epoch")  # of transformers, which TRL extends


def read_history(file: Path) -> Metrics:
    """Return the metrics in trainer_state.json, or in a JSONL file with the same entries.

    Raises:
        ValueError: it is no such file.
    """
    try:
        text = file.read_text()
        if file.name == STATE:
            entries = json.loads(text)["log_history"]
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        return merged(
            (int(entry["step"]), {k: finite_or_nan(v) for k, v in entry.items() if k != "step"})
            for entry in entries
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: no log of a trainer: {error!r}") from error


def is_history(file: Path) -> bool:
    """Whether the file holds entries of a trainer's history, and not lines of verl's logger."""
    if file.name == STATE:
        return True
    with file.open() as lines:
        try:
            first = json.loads(lines.readline())
        except ValueError:
            return False
    return isinstance(first, Mapping) and {"step", "epoch"} <= first.keys()


def in_verls_names(metrics: Metrics) -> Metrics | None:
    """Return TRL's metrics under verl's names; None for metrics that are not TRL's.

    Raises:
        ValueError: a trainer of transformers wrote them, and they hold no reward.
    """
    names = {name for values in metrics.values() for name in values}
    bare = {PREFIX.sub("", name) for name in names}
    if "reward" not in bare and not any(map(REWARD.fullmatch, bare)):
        if bare.issuperset(OF_A_TRAINER):
            raise ValueError("no reward in it, so it is no log of TRL's GRPOTrainer")
        return None
    return merged(
        (int(values.get(STEP, step)), {_verls(name): value for name, value in values.items()})
        for step, values in metrics.items()
    )


def _verls(name: str) -> str:
    bare = PREFIX.sub("", name)
    reward = REWARD.sub(r"\1", bare)
    if not name.startswith("eval"):
        return f"gdpo/{reward}/mean" if reward != bare else NAMES.get(bare, name)
    return f"val-aux/eval/{reward}/mean@1" if reward != bare or bare == "reward" else name
