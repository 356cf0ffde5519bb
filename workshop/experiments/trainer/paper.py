"""Numbers of others: the paper's, and those of an independent rerun."""

from math import sqrt
from statistics import fmean, stdev, variance

from scipy import stats

# BFCL-v3, tool calling, in %: model, arm: average, share of right formats; means of five runs
BFCL = {
    ("1.5B", "grpo"): (30.18, 76.33),
    ("1.5B", "gdpo"): (32.81, 80.66),
    ("3B", "grpo"): (39.20, 81.64),
    ("3B", "gdpo"): (40.87, 82.23),
}
# the step at which the format reached 0.8, in five runs of somebody else with ToolRL's rewards
RERUN = {"gdpo": (18, 19, 75, 16, 65), "grpo": (37, 43, 34, 31, 31)}


def rerun_difference() -> tuple[float, float, float]:
    """Steps of GRPO minus steps of GDPO, with a 95 % interval (Welch)."""
    grpo, gdpo = RERUN["grpo"], RERUN["gdpo"]
    found = stats.ttest_ind(grpo, gdpo, equal_var=False).confidence_interval(0.95)
    return fmean(grpo) - fmean(gdpo), float(found.low), float(found.high)


def rerun_detectable() -> float:
    """The difference in steps that two times five such runs find with 80 % power, at 95 %."""
    grpo, gdpo = RERUN["grpo"], RERUN["gdpo"]
    parts = [variance(arm) / len(arm) for arm in (grpo, gdpo)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(arm) - 1) for part, arm in zip(parts, (grpo, gdpo), strict=True)
    )
    quantiles = stats.t.ppf([0.975, 0.8], freedom)
    return float(quantiles.sum()) * sqrt(sum(parts))


def rerun_spread(arm: str) -> float:
    return stdev(RERUN[arm])
