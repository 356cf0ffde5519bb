"""Scorers: pure functions from (response, ground truth) to named rewards. One file a task.

A scorer is `score(response, ground_truth, *, response_tokens, step, **options) -> {name: value}`.
It gives a bad response a low score, and raises on a bad ground truth. A value is None where the
reward does not apply to the row. Beside it, `bounds(**options) -> {name: (lowest, highest)}` says
between which values its rewards lie over a whole run with these options.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verl_gdpo.rewards import tool_rl

# verl's `data_source` column -> the scorer of its rows
SCORERS: dict[str, Callable[..., Mapping[str, float | None]]] = {"rlla": tool_rl.score}

BOUNDS: dict[str, Callable[..., Mapping[str, tuple[float, float]]]] = {"rlla": tool_rl.bounds}

# every reward that a scorer may return; verl's own scorers, of all other rows, mostly return "acc"
REWARD_NAMES: dict[str, tuple[str, ...]] = {"rlla": ("format", "correctness", "length")}
VERL_REWARD_NAMES = ("acc",)

# keywords of every scorer that are no options
GIVEN_BY_MANAGER = ("response_tokens", "step")

# names that verl's own scorer of the same rows gives these rewards, for existing scripts
VERL_NAMES: dict[str, dict[str, str]] = {
    "rlla": {"accuracy_reward": "correctness", "format_reward": "format"}
}


def belongs_elsewhere(name: str, data_source: str) -> bool:
    """Whether the rows of other data sources have the reward `name`, and these do not."""
    here = _names_of(data_source)
    others = {name for source in SCORERS for name in _names_of(source)} | {*VERL_REWARD_NAMES}
    return name in others - here


def _names_of(data_source: str) -> set[str]:
    names = REWARD_NAMES.get(data_source, VERL_REWARD_NAMES)
    return {*names, *VERL_NAMES.get(data_source, {})}


def declared_bounds(
    sources: Iterable[str], options: Mapping[str, Any]
) -> dict[str, set[tuple[float, float]]]:
    """{reward: its bounds (lowest, highest)}, also under verl's names.

    Args:
        sources: data sources; those that our scorers do not score declare nothing.
        options: of the scorers, `reward.reward_kwargs`.

    More than one pair of bounds says that the sources disagree.

    Raises:
        ValueError: an option that a scorer does not accept.
    """
    result: dict[str, set[tuple[float, float]]] = {}
    for source in sources:
        if source not in BOUNDS or not _takes(SCORERS[source], options):
            continue
        bounds = dict(BOUNDS[source](**options))
        for verl_name, name in VERL_NAMES.get(source, {}).items():
            bounds |= {verl_name: bounds[name]} if name in bounds else {}
        for name, pair in bounds.items():
            result.setdefault(name, set()).add(pair)
    return result


def _takes(scorer: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether the scorer can be called with the options; if not, they are meant for another."""
    try:
        inspect.signature(scorer).bind("", "", **options)
    except TypeError:
        return False
    return True


def check_options(options: Mapping[str, Any], sources: Iterable[str]) -> None:
    """Check `reward.reward_kwargs` of a run whose rows have these data sources.

    Raises:
        ValueError: names an option that none of our scorers in use takes.
    """
    taken = {source: _options_of(source) for source in sources if source in SCORERS}
    for name in options:
        if not any(name in names for names in taken.values()):
            takes = [f"rows of {source!r} take {names}" for source, names in taken.items()]
            raise ValueError(
                f"reward.reward_kwargs.{name}: no scorer of the training rows takes it "
                f"({'; '.join(takes) or 'verl scores them, without options'}). Remove it; on the "
                f"command line, ~reward.reward_kwargs.{name}"
            )


def options_for(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that are meant for the scorer of another data source."""
    others = {name for other in SCORERS for name in _options_of(other)} - {*_options_of(source)}
    return {name: value for name, value in options.items() if name not in others}


def _options_of(source: str) -> list[str]:
    parameters = inspect.signature(SCORERS[source]).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [name for name in named if name not in GIVEN_BY_MANAGER]


def check_ground_truths(rows: Iterable[Mapping[str, Any]], where: str) -> None:
    """Score an empty response against each row, to find a bad ground truth before training.

    Args:
        rows: with verl's `data_source` and `reward_model` columns; unknown sources are passed over.
        where: what the message calls the rows, such as "data.train_files".

    Raises:
        ValueError: names the row and what is wrong with it.
    """
    for number, row in enumerate(rows):
        scorer = SCORERS.get(row["data_source"])
        if scorer is None:
            continue
        ground_truth = (row["reward_model"] or {}).get("ground_truth")
        try:
            scorer("", ground_truth)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}, row {number} (data_source {row['data_source']!r}): {error}"
            ) from error
