"""What docs/in_verls_trainer.md says of the second edition: tables, and a sentence a setting."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from verl_gdpo.tools.report.page import signed
from workshop.experiments.trainer.compare import (
    Difference,
    Endpoint,
    Results,
    declared,
    difference,
    holm,
    mean_of_all,
    share,
)
from workshop.experiments.trainer.pictures import NAMES
from workshop.experiments.trainer.results import read_replaced
from workshop.experiments.trainer.settings import SECOND, SETTINGS, Run, pilot

LONG, CODING = "20_to_1_long", "coding"
UNTIL, LAST = (30, 60, 90, 120), 10  # a number of the horizon is the mean of so many steps
FIVE = 5  # steps at the beginning and at the end of a pilot
VARIES = 0.2  # the least share of the groups in the pilot
RIVALS = ("grpo", "grpo_rescaled")
UNKNOWN = "-"


def conclusions(found: Results) -> Iterator[str]:
    """A sentence for each setting of which something is claimed."""
    gains = holm(found)
    for name in SECOND:
        setting, of = SETTINGS[name], [gains[name, "gdpo", other] for other in RIVALS]
        if any(gain.verdict == "not complete" for gain in of):
            yield f"{setting.title}: {_seeds(found, name)} seeds are done, so nothing is claimed."
            continue
        said = [
            f"minus {NAMES[other]} is {gain.text()} ({gain.verdict})"
            for other, gain in zip(RIVALS, of, strict=True)
        ]
        yield f"{setting.title}, {setting.primary}: GDPO {', and '.join(said)}."


def verdicts(found: Results) -> str:
    """How many comparisons have each verdict."""
    said = Counter(gain.verdict for gain in holm(found).values())
    parts = [f"{number} {verdict}" for verdict, number in said.most_common()]
    return f"of {sum(said.values())} comparisons, {', '.join(parts)}"


def primary(found: Results) -> str:
    """A line for each of these settings: the primary endpoint of the arms, and what is claimed."""
    gains = holm(found)
    lines = _head("setting", "share of", "seeds", *NAMES_IN_ORDER, *_minus())
    for name in SECOND:
        setting = SETTINGS[name]
        cells = [setting.title, setting.primary, _seeds(found, name)]
        cells += [_mean(found, name, arm) for arm in (*RIVALS, "gdpo")]
        of = [gains[name, "gdpo", other] for other in RIVALS]
        lines.append(_line(*cells, *(f"{gain.text()}; {gain.verdict}" for gain in of)))
    return "\n".join(lines)


def endpoints(found: Results) -> str:
    """A line for each endpoint of each setting, with 95 % intervals that are not corrected."""
    lines = _head("setting", "endpoint", "seeds", *_minus())
    for name in (*SECOND, CODING):
        setting = SETTINGS[name]
        for what, endpoint in _endpoints(name).items():
            cells = [
                _at_95(found, name, other, endpoint).text() if other in setting.arms else UNKNOWN
                for other in RIVALS
            ]
            lines.append(_line(setting.title, what, _seeds(found, name), *cells))
    return "\n".join(lines)


def twice(found: Results) -> str:
    """What the runs earned that were made on two machines: the mean over all steps."""
    parts = []
    for run, again in found.items():
        if first := read_replaced(run):
            of = [
                f"{reward} {fmean(curve):.3f} and {fmean(again.shares[reward]):.3f}"
                for reward, curve in first.shares.items()
            ]
            parts.append(f"`{run}`: {', '.join(of)}")
    return "; ".join(parts)


def horizon(found: Results) -> str:
    """For each seed of the long training, a line for each arm and their difference."""
    until = [f"steps {step - LAST + 1} to {step}" for step in UNTIL]
    lines = _head("seed", "arm", *(f"small, {text}" for text in until), "large, the last ones")
    for seed in SETTINGS[LONG].seeds:
        of_arm = _of_long(found, seed)
        for arm, cells in of_arm.items():
            lines.append(_line(str(seed), NAMES[arm], *map(_number, cells)))
        if len(of_arm) == 2:
            more = [signed(gain, 3) for gain in _gains(of_arm)]
            lines.append(_line(str(seed), "GDPO minus GRPO", *more))
    return "\n".join(lines) if len(lines) > 2 else "No run of it is done yet."


def shrinks(found: Results) -> str:
    """The gain of the small reward at the first and at the last of these ends, over the seeds."""
    arms = [_of_long(found, seed) for seed in SETTINGS[LONG].seeds]
    gains = [_gains(of_arm) for of_arm in arms if len(of_arm) == 2]
    if not gains:
        return ""
    first, last = (fmean(row[place] for row in gains) for place in (0, len(UNTIL) - 1))
    return (
        f"GDPO minus GRPO is {signed(first, 2)} in the steps up to {UNTIL[0]}, and "
        f"{signed(last, 2)} in those up to {UNTIL[-1]}, as the mean of {len(gains)} seeds."
    )


def _of_long(found: Results, seed: int) -> dict[str, list[float]]:
    runs = {arm: Run(LONG, arm, seed) for arm in SETTINGS[LONG].arms}
    return {arm: _at_ends(found[run].shares) for arm, run in runs.items() if run in found}


def _gains(of_arm: Mapping[str, Sequence[float]]) -> list[float]:
    return [gdpo - grpo for gdpo, grpo in zip(of_arm["gdpo"], of_arm["grpo"], strict=True)]


def _at_ends(curves: Mapping[str, Sequence[float]]) -> list[float]:
    small = [fmean(curves["small"][step - LAST : step]) for step in UNTIL]
    return [*small, fmean(curves["large"][-LAST:])]


def piloted(found: Results) -> str:
    """A line for each reward of each pilot."""
    lines = _head("setting", "reward", "varies in", "spread", "share of it at first", "at last")
    for run in pilot():
        if run in found:
            kept = found[run]
            for reward, curve in kept.shares.items():
                parts = (kept.spread[reward][:FIVE], curve[:FIVE], curve[-FIVE:])
                cells = [f"{100 * fmean(kept.varies[reward]):.0f} %"]
                cells += [_number(fmean(part)) for part in parts]
                lines.append(_line(SETTINGS[run.setting].title, reward, *cells))
    return "\n".join(lines)


def _endpoints(name: str) -> dict[str, Endpoint]:
    setting = SETTINGS[name]
    rewards = {reward: share(reward) for reward in setting.columns}
    more = {"declared score": declared} if len({*setting.worth.values()}) > 1 else {}
    return {**rewards, "mean of all": mean_of_all, **more}


def _at_95(found: Results, name: str, other: str, endpoint: Endpoint) -> Difference:
    return difference(found, name, "gdpo", other, endpoint, level=0.95)


def _mean(found: Results, name: str, arm: str) -> str:
    runs = [Run(name, arm, seed) for seed in SETTINGS[name].seeds]
    values = [fmean(found[run].shares[SETTINGS[name].primary]) for run in runs if run in found]
    return _number(fmean(values)) if values else UNKNOWN


def _seeds(found: Results, name: str) -> str:
    setting = SETTINGS[name]
    done = min(sum(Run(name, arm, s) in found for s in setting.seeds) for arm in setting.arms)
    return f"{done} of {len(setting.seeds)}"


NAMES_IN_ORDER = tuple(NAMES[arm] for arm in (*RIVALS, "gdpo"))


def _minus() -> list[str]:
    return [f"GDPO minus {NAMES[other]}" for other in RIVALS]


def _head(*cells: str) -> list[str]:
    return [_line(*cells), "|---" * len(cells) + "|"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:.3f}"
