"""`algorithm.gdpo.dialect`: the options that reproduce another implementation of GDPO.

The results agree to 1e-5 if every group has at least two samples and the batch has variance. We
do not copy what the others do in special cases: NaN or 0 for a missing reward (TRL leaves it out as
we do), rounding errors instead of 0 for a constant reward, the raw reward for a group of one
sample.
"""

from collections.abc import Mapping
from typing import Any

from verl_gdpo.advantage.equation import PAPER_EPS, VERL_EPS

_PAPER = {
    "group_norm": "per_reward",
    "batch_norm": "sample",
    "eps": PAPER_EPS,
    "batch_eps": None,  # the value of eps
    "batch_var_eps": 0.0,
    "normalize_by_std": True,
}

DIALECTS: Mapping[str, Mapping[str, Any]] = {
    "paper": _PAPER,
    # TRL 1.16 GRPOTrainer, multi_objective_aggregation="normalize_then_sum"
    "trl": _PAPER,
    # NeMo-RL GDPOAdvantageEstimator, use_leave_one_out_baseline=False; no eps in the batch step
    "nemo_rl": {**_PAPER, "eps": 1e-6, "batch_eps": 0.0},
    # verl 0.9 compute_gdpo_outcome_advantage; its whitening divides by sqrt(variance + 1e-8)
    "verl_builtin": {
        **_PAPER,
        "batch_norm": "token",
        "eps": VERL_EPS,
        "batch_eps": 0.0,
        "batch_var_eps": 1e-8,
    },
}


def read_dialect(where: str, name: Any) -> Mapping[str, Any]:
    """Return the settings of the dialect `name`, or the paper's settings for None."""
    if name is None:
        return DIALECTS["paper"]
    known = list(DIALECTS)
    if name not in known:
        raise ValueError(f"{where}: expected one of {known} or null, got {name!r}")
    return DIALECTS[name]


def check_dialect(settings: Any, block: Mapping[str, Any]) -> None:
    """Raise ValueError if `settings`, which were read from `block`, contradict its dialect."""
    for key, value in read_dialect("", block.get("dialect")).items():
        got = getattr(settings, key)
        if got != value:
            # a key that is not in the block can only differ through verl's own setting
            set_key = "norm_adv_by_std_in_grpo" if block.get(key) is None else f"gdpo.{key}"
            raise ValueError(
                f"algorithm.{set_key}={got} contradicts "
                f"algorithm.gdpo.dialect={block['dialect']}, which stands for "
                f"{key}={'null' if value is None else value}; leave one of them out"
            )
