"""A small simulation of rewards that GDPO harms, and of rewards for which only GDPO helps."""

from functools import cache
from statistics import fmean

import pyarrow.parquet as pq

from workshop.experiments import results
from workshop.experiments.differences import Difference


@cache
def shares() -> dict[tuple[str, str, str], list[float]]:
    """{(setting, reward, arm): the share of the reward, one a seed}."""
    shares_of: dict[tuple[str, str, str], list[float]] = {}
    for row in pq.read_table(results.BANDIT).to_pylist():
        shares_of.setdefault((row["setting"], row["reward"], row["arm"]), []).append(row["share"])
    return shares_of


def mean(setting: str, reward: str, arm: str) -> str:
    return f"{fmean(shares()[setting, reward, arm]):.2f}"


def difference(setting: str, reward: str, over: str = "grpo", arm: str = "gdpo") -> Difference:
    """`arm` minus `over`, paired by seed."""
    pairs = zip(*(shares()[setting, reward, each] for each in (arm, over)), strict=True)
    return Difference(tuple(one - other for one, other in pairs))


def has(setting: str, arm: str) -> bool:
    return any((of, each) == (setting, arm) for of, _, each in shares())


def weights(setting: str, arm: str) -> str:
    """The weights of an arm, as the page has them."""
    rows = pq.read_table(results.BANDIT, filters=[("setting", "=", setting)]).to_pylist()
    [weights_K] = {tuple(row["weights"]) for row in rows if row["arm"] == arm}
    return ", ".join(f"{weight:.3g}" for weight in weights_K)
