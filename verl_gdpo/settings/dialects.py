"""`algorithm.gdpo.dialect`: the options under which the estimator is another implementation's GDPO.

Equal to it to 1e-5 where every group has two samples or more and the batch has variance. Not
taken over is what they do elsewhere: NaN for a missing reward, rounding instead of 0 for a constant
one, the raw reward of a group of one.
"""

from collections.abc import Mapping
from typing import Any

_PAPER = {
    "group_norm": "per_reward",
    "batch_norm": "sample",
    "eps": 1e-4,
    "batch_eps": None,  # as eps
    "batch_var_eps": 0.0,
    "normalize_by_std": True,
}

DIALECTS: Mapping[str, Mapping[str, Any]] = {
    "paper": _PAPER,
    # TRL 1.16 GRPOTrainer, multi_objective_aggregation="normalize_then_sum"
    "trl": _PAPER,
    # NeMo-RL GDPOAdvantageEstimator, use_leave_one_out_baseline=False: no eps in the batch step
    "nemo_rl": {**_PAPER, "eps": 1e-6, "batch_eps": 0.0},
    # verl 0.9 compute_gdpo_outcome_advantage; its whitening divides by sqrt(variance + 1e-8)
    "verl_builtin": {
        **_PAPER,
        "batch_norm": "token",
        "eps": 1e-6,
        "batch_eps": 0.0,
        "batch_var_eps": 1e-8,
    },
}


def read_dialect(where: str, name: Any) -> Mapping[str, Any]:
    """What the dialect stands for; without one, the paper's values are the defaults."""
    if name is None:
        return DIALECTS["paper"]
    known = list(DIALECTS)
    if name not in known:
        raise ValueError(f"{where}: expected one of {known} or null, got {name!r}")
    return DIALECTS[name]


def check_dialect(settings: Any, block: Mapping[str, Any]) -> None:
    """Raise ValueError where `settings`, read from `block`, are not what its dialect stands for."""
    for key, value in read_dialect("", block.get("dialect")).items():
        got = getattr(settings, key)
        if got != value:
            # only verl's own setting is there without being in the block
            set_key = "norm_adv_by_std_in_grpo" if block.get(key) is None else f"gdpo.{key}"
            raise ValueError(
                f"algorithm.{set_key}={got} contradicts "
                f"algorithm.gdpo.dialect={block['dialect']}, which stands for "
                f"{key}={'null' if value is None else value}; leave one of them out"
            )
