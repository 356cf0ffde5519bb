"""Computes every verdict again from the raw files, and imports nothing of this project.

python workshop/experiments/recheck.py    # compares with both pages; ends with 1 if one differs

The formulas are written anew from the words of the pages and of the protocol. Then the labels of
the two arms of each comparison are permuted within seeds or draws, in every way that is not the
true one: of what was claimed, at most 5 % may be claimed of the permuted data.
"""

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
NUMBER = r"[+-]?\d+\.\d+"
MAY_SURVIVE = 0.05

# --- verl's trainer: seven paired comparisons, Bonferroni, a band of 0.05 -------------------------

# setting: its name on the page, and the seeds of the protocol
TRAINER = {
    "20_to_1": ("ranges 20 and 1", 5),
    "1_to_1": ("equal ranges", 5),
    "by_prompt": ("ranges by prompt", 8),
    "tool_rl": ("ToolRL's rewards", 5),
}
TRAINER_LEVEL, TRAINER_BAND = 1 - 0.05 / 7, 0.05
RIVALS_OF_TRAINER = ("grpo", "grpo_rescaled")


def trainer_differences() -> dict[tuple[str, str], np.ndarray]:
    """{(setting, rival): GDPO minus it in the small reward, one number a seed}."""

    def small(run: str) -> float:
        return float(
            np.mean(json.loads((HERE / "trainer/data" / f"{run}.json").read_text())["small"])
        )

    found = {}
    for setting, (_, seeds) in TRAINER.items():
        for rival in RIVALS_OF_TRAINER:
            if (HERE / "trainer/data" / f"{setting}-{rival}-1.json").exists():
                found[setting, rival] = np.array(
                    [
                        small(f"{setting}-gdpo-{seed}") - small(f"{setting}-{rival}-{seed}")
                        for seed in range(1, seeds + 1)
                    ]
                )
    return found


def trainer_verdict(low: float, high: float, band: float = TRAINER_BAND) -> str:
    is_small = low > -band and high < band
    if low > 0 or high < 0:
        return "difference, but none that matters" if is_small else "difference"
    return "no difference that matters" if is_small else "open"


def trainer_rows() -> dict[tuple[str, str], tuple[list[float], str]]:
    """What the page says: mean, low and high, and the verdict."""
    return rows_between("## The results", 'A "difference"', {t: s for s, (t, _) in TRAINER.items()})


def rows_between(
    begin: str, end: str, settings: dict[str, str]
) -> dict[tuple[str, str], tuple[list[float], str]]:
    """Of a table of the page, whose last two columns are the rivals."""
    text = (DOCS / "in_verls_trainer.md").read_text().split(begin)[1].split(end)[0]
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")][1:-1]
        if cells and cells[0] in settings:
            for rival, cell in zip(RIVALS_OF_TRAINER, cells[-2:], strict=True):
                if ";" in cell:
                    numbers, said = cell.split("; ")
                    found = [*map(float, re.findall(NUMBER, numbers))]
                    rows[settings[cells[0]], rival] = (found, said)
    return rows


# --- its second edition: eight comparisons, Holm, a band of 0.02 ----------------------------------

# setting: its name on the page, and the reward that decides
SECOND = {
    "gsm8k": ("GSM8K's three", "correctness"),
    "maths": ("maths and length", "correctness"),
    "maths_if_correct": ("length only if correct", "length"),
    "tool_rl_seeds": ("ToolRL's rewards, again", "format"),
}
SECOND_SEEDS, SECOND_BAND = 5, 0.02


def second_differences() -> dict[tuple[str, str], np.ndarray]:
    """{(setting, rival): GDPO minus it in the primary reward, one number a seed that is done}."""
    found = {}
    for setting, (_, reward) in SECOND.items():
        for rival in RIVALS_OF_TRAINER:
            pairs = []
            for seed in range(1, SECOND_SEEDS + 1):
                files = [
                    HERE / f"trainer/data_2/{setting}-{a}-{seed}.json" for a in ("gdpo", rival)
                ]
                if all(file.exists() for file in files):
                    one, other = (json.loads(file.read_text()) for file in files)
                    if one["inputs"] != other["inputs"]:
                        raise ValueError(f"{files}: the arms had other rows or policies")
                    pairs.append(np.mean(one["shares"][reward]) - np.mean(other["shares"][reward]))
            found[setting, rival] = np.array(pairs)
    return found


def p_of(differences: np.ndarray) -> float:
    """Of a t test; 1 if a seed is missing."""
    if len(differences) < SECOND_SEEDS:
        return 1.0
    if np.ptp(differences) == 0:
        return float(differences[0] == 0)
    return float(stats.ttest_1samp(differences, 0).pvalue)


def holm_levels(p_values: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """The level at which Holm tests each comparison."""
    levels, tested = {}, len(p_values)
    for key in sorted(p_values, key=lambda key: p_values[key]):
        levels[key] = 1 - 0.05 / tested
        tested -= p_values[key] < 0.05 / tested
    return levels


def check_second() -> Iterator[str]:
    """Yield what differs from the page."""
    found = second_differences()
    begin, end = "## Rewards that many train with", "All endpoints"
    rows = rows_between(begin, end, {title: name for name, (title, _) in SECOND.items()})
    levels = holm_levels({key: p_of(differences) for key, differences in found.items()})
    survived = []
    for key, differences in found.items():
        said, numbers = "not complete", []
        if len(differences) > 1:
            critical = stats.t.ppf((1 + levels[key]) / 2, len(differences) - 1)
            low, high = ends(differences, critical)
            numbers = [round(float(x), 3) for x in (differences.mean(), low, high)]
        if len(differences) == SECOND_SEEDS:
            said = trainer_verdict(low, high, SECOND_BAND)
            if said.startswith("difference"):
                survived.append(surviving(differences, critical))
        shown, verdict = rows.get(key, ([], ""))
        is_same = len(differences) < 2 or np.allclose(shown, numbers, atol=0.0011)
        if verdict != said or not is_same:
            yield f"{key}: the page says {shown} {verdict!r}, the files say {numbers} {said!r}"
    yield from check_survival(f"trainer, second edition: {len(found)} comparisons", survived)


# --- the simulation: eight draws, the largest t of the settings, a band of 0.02 -------------------

MAP_BAND, DRAWS, OPTIMIZERS = 0.02, 8, ("one scale", "adam")
RIVALS = ("grpo", "grpo_range")
VERDICTS = ("more", "a little more", "no difference", "open", "a little less", "less")


def map_outcomes() -> dict[tuple[str, str, str], dict[int, float]]:
    """{(optimiser, setting, arm): the outcome of each draw}."""
    with (HERE / "map/data/outcomes.csv").open(newline="") as file:
        return {
            (line["optimizer"], line["setting"], line["arm"]): {
                draw: float(text) for draw, text in enumerate(line["shares"].split()) if text != "-"
            }
            for line in csv.DictReader(file)
        }


def map_differences(rivals: Sequence[str]) -> dict[tuple[str, str, str], np.ndarray]:
    """{(optimiser, setting, rival): GDPO minus it, one number a draw}."""
    outcomes = map_outcomes()
    found = {}
    for optimizer, setting, arm in outcomes:
        if arm == "gdpo":
            for rival in rivals:
                # where all ranges are equal, rescaled GRPO is GRPO and has no line
                key = (optimizer, setting, rival)
                other = outcomes.get(key, outcomes[optimizer, setting, "grpo"])
                one = outcomes[optimizer, setting, "gdpo"]
                found[key] = np.array([one[d] - other[d] for d in sorted({*one} & {*other})])
    return found


def map_verdict(low: float, high: float) -> str:
    middle = (low + high) / 2
    if low > 0 or high < 0:
        word = "more" if middle > 0 else "less"
        return word if abs(middle) >= MAP_BAND else f"a little {word}"
    return "no difference" if low > -MAP_BAND and high < MAP_BAND else "open"


def both(one: str, other: str) -> str:
    for word in ("more", "less"):
        kinds = (word, f"a little {word}")
        if one in kinds and other in kinds:
            return kinds[max(kinds.index(one), kinds.index(other))]
    return one if one == other else "open"


def map_rows() -> dict[tuple[str, str], str]:
    """The verdict of both optimisers on the page of all settings: {(setting, rival): verdict}."""
    rows = {}
    for line in (DOCS / "when_gdpo_helps/all_settings.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 10 and cells[1] not in ("setting", "---"):
            rows[cells[1], "grpo"], rows[cells[1], "grpo_range"] = cells[5], cells[8]
    return rows


def map_others() -> dict[str, tuple[list[float], list[int]]]:
    """{estimator: both means, and how many settings have each verdict} on the page."""
    text = (DOCS / "when_gdpo_helps.md").read_text().split("## The other estimators")[1]
    rows = {}
    for line in text.split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `"):
            means = [*map(float, re.findall(NUMBER, cells[2]))]
            rows[cells[1].strip("`")] = (means, [*map(int, cells[3:-1])])
    return rows


# --- what both have -------------------------------------------------------------------------------


def ends(differences: np.ndarray, critical: float) -> tuple[float, float]:
    """The interval of Student, given its critical t."""
    half = critical * differences.std(ddof=1) / np.sqrt(len(differences))
    return float(differences.mean() - half), float(differences.mean() + half)


def surviving(differences: np.ndarray, critical: float) -> float:
    """The share of the permuted data of which a difference is claimed."""
    signs = np.array([*product((1, -1), repeat=len(differences))])[1:]  # the first is the true one
    permuted = signs * differences
    error = permuted.std(axis=1, ddof=1) / np.sqrt(permuted.shape[1])
    return float((abs(permuted.mean(1)) > critical * error).mean())


def check_trainer() -> Iterator[str]:
    """Yield what differs from the page."""
    rows, survived = trainer_rows(), []
    found = trainer_differences()
    if {*rows} != {*found}:
        yield f"the page has {sorted(rows)}, the files {sorted(found)}"
    for key, differences in found.items():
        critical = stats.t.ppf((1 + TRAINER_LEVEL) / 2, len(differences) - 1)
        low, high = ends(differences, critical)
        said = trainer_verdict(low, high)
        numbers = [round(float(x), 3) for x in (differences.mean(), low, high)]
        if said.startswith("difference"):
            survived.append(surviving(differences, critical))
        shown, verdict = rows.get(key, ([], ""))
        if verdict != said or not np.allclose(shown, numbers, atol=0.0011):
            yield f"{key}: the page says {shown} {verdict!r}, the files say {numbers} {said!r}"
    yield from check_survival(f"trainer: {len(found)} comparisons", survived)


def check_map() -> Iterator[str]:
    """Yield what differs from the page of all settings."""
    rows, survived = map_rows(), list[float]()
    found = map_differences(RIVALS)
    settings = {setting for _, setting, _ in found}
    if {*rows} != {*product(settings, RIVALS)}:
        yield f"the page has {len(rows)} verdicts, the files {2 * len(settings)}"
    for setting, rival in rows:
        of = [found[optimizer, setting, rival] for optimizer in OPTIMIZERS]
        said = map_said(of, len(settings), survived)
        if rows[setting, rival] != said:
            yield f"{setting}, {rival}: the page says {rows[setting, rival]!r}, the files {said!r}"
    yield from check_survival(f"simulation: {len(rows)} verdicts of both optimisers", survived)


def check_others() -> Iterator[str]:
    """Yield what differs from the table of the other estimators."""
    rows, survived = map_others(), list[float]()
    found = map_differences([*rows])
    settings = {setting for _, setting, _ in found}
    arms = {arm for _, _, arm in map_outcomes()} - {"gdpo", "grpo", "grpo_range"}
    if {*rows} != arms - {"grpo_prompt_range"}:
        yield f"the page has the estimators {sorted(rows)}, the files {sorted(arms)}"
    for rival, (means, counts) in rows.items():
        of_setting = {
            setting: [found[optimizer, setting, rival] for optimizer in OPTIMIZERS]
            for setting in settings
        }
        said = Counter(map_said(of, len(settings), survived) for of in of_setting.values())
        expected = [np.mean([of[k].mean() for of in of_setting.values()]) for k in (0, 1)]
        if counts != [said[verdict] for verdict in VERDICTS] or not np.allclose(
            means, expected, atol=0.0006
        ):
            yield f"{rival}: the page says {means} {counts}, the files {expected} {said}"
    yield from check_survival(f"simulation: {len(rows)} other estimators", survived)


def map_said(of_optimizer: list[np.ndarray], settings: int, survived: list[float]) -> str:
    """The verdict of both optimisers; adds what permuted draws claim, for each one that claims."""
    critical = stats.t.ppf((1 + 0.95 ** (1 / settings)) / 2, DRAWS - 1)
    verdicts = []
    for differences in of_optimizer:
        if len(differences) < DRAWS:
            return "not complete"
        verdicts.append(map_verdict(*ends(differences, critical)))
        if "more" in verdicts[-1] or "less" in verdicts[-1]:
            survived.append(surviving(differences, critical))
    return both(*verdicts)


def check_survival(what: str, survived: list[float]) -> Iterator[str]:
    share = float(np.mean(survived)) if survived else 0.0
    print(f"{what}; {len(survived)} claims; {share:.1%} are claimed of permuted labels")
    if share > MAY_SURVIVE:
        yield f"{what}: {share:.1%} of the claims survive a permutation; expected at most 5 %"


def main() -> int:
    wrong = [*check_trainer(), *check_second(), *check_map(), *check_others()]
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(wrong)} differ from the pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
