"""What made-up responses earned: a table for each data source, and what its values cannot train."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from verl_gdpo.algorithm.conditions import paid_in_batch
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.read_settings import REWARDS
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import ROLLOUT_FACTS, is_internal, may_be_meant, value_or_error
from verl_gdpo.algorithm.zero import Floats, is_at_least
from verl_gdpo.hooks.configuration import paid_failures, sums_first
from verl_gdpo.scoring.function_list import owner_of
from verl_gdpo.terminal import render, short_number
from verl_gdpo.tools.check.dry_run import DryRun
from verl_gdpo.tools.check.made_up_responses import RIGHT

NEVER_VARIES = "NEVER VARIES"
NEVER_APPLIES = "never applies"
HEADER = ("reward", "weight", "min", "max", "")  # the last is a remark
LEFT = (0, 4)  # columns with words


class RewardLine(NamedTuple):
    reward: str
    weight: float | None  # None for what is not trained on
    low: float
    high: float
    remark: str

    @property
    def cells(self) -> tuple[str, ...]:
        weight = "-" if self.weight is None else f"{self.weight:g}"
        ends = (short_number(end).replace("nan", "-") for end in (self.low, self.high))
        return (self.reward, weight, *ends, self.remark)


class RewardTables:
    """A table for each data source; its rewards are computed as the training does.

    Without `settings`, the run trains on the scores of verl's own managers.

    Args:
        untold: functions of the list of whose rewards these samples tell nothing. They were not
            called, or compare the samples of a group, which has one here.

    Raises:
        RewardError: the scorers' results do not make a matrix of rewards; see `RewardMatrix.of`.
    """

    def __init__(
        self, run: DryRun, settings: GdpoSettings | None, untold: Collection[str] = ()
    ) -> None:
        self.run, self.settings, self.untold = run, settings, untold
        self.places: dict[str, list[int]] = {}  # of the samples of each data source
        for place, sample in enumerate(run.samples):
            self.places.setdefault(sample.source, []).append(place)
        if settings is None:
            score_B1 = _numbers(run.scores)[:, None]
            self.rewards = RewardMatrix({"score": 1.0}, score_B1, np.ones_like(score_B1, np.bool_))
        else:
            self.rewards = RewardMatrix.of(run.rows(), settings)
        self.lines = {source: [*self._lines(here)] for source, here in self.places.items()}

    def __iter__(self) -> Iterator[str]:
        for source, lines in self.lines.items():
            title = f"data_source {source!r}, {len(self.places[source])} responses:"
            yield f"{title}\n{render(HEADER, [line.cells for line in lines], LEFT)}"

    def same_everywhere(self) -> list[str]:
        """A remark for each reward that is the same for all responses of a data source."""
        return [
            f"data_source {source!r}: {line.reward} is the same for all made-up responses"
            for source, lines in self.lines.items()
            for line in lines
            if line.remark == NEVER_VARIES and owner_of(line.reward, self.untold) is None
        ]

    def other_the_second_time(self) -> list[str]:
        """A remark if a response got another reward when it was scored a second time."""
        assert self.run.again is not None
        first = {}
        for sample, info, score in zip(
            self.run.samples, self.run.infos, self.run.scores, strict=True
        ):
            first[sample] = self._trained_on(info, score)
        again = self.run.again
        changes = []
        for sample, info, score in zip(again.samples, again.infos, again.scores, strict=True):
            now = self._trained_on(info, score)
            # A source that failed the first time has been told.
            for name, value in first.get(sample, now).items():
                if value != now[name]:
                    changes.append(
                        f"{sample.label}: {name} was {value}, and {now[name]} when the reward "
                        f"function got the same response again"
                    )
        if not self.run.problems:
            changes += [f"when scored a second time, {problem}" for problem in again.problems]
        if not changes:
            return []
        return [
            f"{changes[0]}. It depends on earlier calls or on chance: verl calls it in several "
            "processes, each of which has a memory of its own"
        ]

    def _trained_on(self, info: Mapping[str, Any], score: Any) -> dict[str, Any]:
        """Return {reward: value} of a sample, without those of weight 0."""
        if self.settings is None:
            return {"score": score}
        return {name: info.get(name) for name, weight in self.rewards.weights.items() if weight}

    def paid_failures(self, config: Any, settings: GdpoSettings) -> tuple[list[str], list[str]]:
        """Return problems and remarks of conditions that are better failed, by these values."""
        problems: list[str] = []
        remarks: list[str] = []
        known = {paid.reward for paid in paid_failures(config, settings)}
        if self.rewards.raw is None:
            return problems, remarks
        is_summed = sums_first(config.algorithm.adv_estimator, settings)
        for paid in paid_in_batch(self.rewards.raw, self.run.rows(), settings, is_summed=is_summed):
            if paid.is_default:
                problems.append(paid.message)
            elif paid.reward not in known:  # else the bounds have told it
                remarks.append(paid.message)
        return problems, remarks

    def dropped(self, functions: Collection[str] = (), silent: Collection[str] = ()) -> list[str]:
        """A remark for each name that is no reward in any response, although it looks like one.

        Args:
            functions: the names of the list's functions.
            silent: those of them that were not called.
        """
        if self.settings is None or self.settings.rewards is not None:
            return []
        known = {*self.rewards.weights, *self.settings.bounds, *ROLLOUT_FACTS, "score"}
        values = {name: value for info in self.run.infos for name, value in info.items()}
        remarks = []
        for name, value in values.items():
            if name in known or is_internal(name) or owner_of(name, functions) in silent:
                continue
            if value is None or may_be_meant(value):
                remarks.append(
                    f"{name!r} is {value!r}, and no number in any response, so it is no reward. "
                    "Return a float, or leave it out"
                )
        return remarks

    def without_signal(self, sources: Collection[str]) -> list[str]:
        """A sentence for each of these data sources in which all that is trained on is the same.

        Only where a right response was tried: wrong ones may all get the lowest reward. And only
        where no other reward may tell responses apart, see `untold`.
        """
        sentences: list[str] = []
        if self._trains_on_untold():
            return sentences
        for source in self.lines.keys() & {*sources}:
            used = [x for x in self.lines[source] if x.weight and x.remark != NEVER_APPLIES]
            never_varies = all(line.remark == NEVER_VARIES for line in used)
            if never_varies and self._has_right_response(source):
                values = ", ".join(f"{line.reward} is {line.low:g}" for line in used)
                count = len(self.places[source])
                sentences.append(
                    f"data_source {source!r}: {values} for each of {count} made-up responses, "
                    "also for the right ones, so nothing would be trained. If the reward function "
                    "only knows answers of another form: --allow-flat"
                )
        return sentences

    def cancelling(self, sources: Collection[str], adv_estimator: str) -> list[str]:
        """A sentence for each of these data sources in which rewards vary, and add up to nothing.

        So do a reward and its opposite, such as {"right": r, "wrong": 1 - r}.
        """
        if self.settings is None or adv_estimator not in ("gdpo", "grpo"):
            return []
        if self._trains_on_untold():
            return []
        # The step over the batch cannot bring back what is 0 in each group.
        settings = replace(self.settings, batch_norm="none")
        if sums_first(adv_estimator, settings):
            settings = replace(settings, group_norm="summed")
        group_B = np.array([sample.row for sample in self.run.samples])
        counted_B = np.ones(len(group_B), np.bool_)
        is_0_B = scalars_of(self.rewards, counted_B, group_B, settings).S_B.numpy() == 0
        sentences = []
        for source in self.lines.keys() & {*sources}:
            here = self.places[source]
            varying = [x.reward for x in self.lines[source] if x.weight and not x.remark]
            if varying and self._has_right_response(source) and is_0_B[here].all():
                sentences.append(
                    f"data_source {source!r}: the rewards {', '.join(varying)} vary, and with "
                    f"their weights they cancel in each of {len(here)} made-up responses, so "
                    "nothing would be trained. Leave one of them out, or weigh them differently. "
                    "If real responses differ: --allow-flat"
                )
        return sentences

    def conditions_never_met(self, settings: GdpoSettings) -> list[str]:
        """A remark for each condition that no made-up response meets, right ones included."""
        remarks: list[str] = []
        if self.rewards.raw is None:
            return remarks
        has_right_N = []
        for place in self.rewards.raw.samples:
            has_right_N.append(self._has_right_response(self.run.samples[place].source))
        for name, term in settings.terms.items():
            if term.when is None:
                continue
            values_N = self.rewards.raw.values[term.when.reward][has_right_N]
            values = values_N[~np.isnan(values_N)]
            if len(values) and not is_at_least(values.max(), term.when.at_least):
                remarks.append(
                    f"{REWARDS}.{name}: no made-up response has {term.when.reward!r} of at least "
                    f"{term.when.at_least:g}, right ones included; the highest is "
                    f"{values.max():g}. So {name!r} would count for no response"
                )
        return remarks

    def _trains_on_untold(self) -> bool:
        """Return whether a reward of `untold` has a weight."""
        if self.settings is None:
            return False
        if self.settings.rewards is None:
            # All that is returned has the weight 1, and no sample has what was not called.
            return bool(self.untold)
        for name, weight in self.rewards.weights.items():
            if weight and owner_of(name, self.untold) is not None:
                return True
        return False

    def _has_right_response(self, source: str) -> bool:
        return any(self.run.samples[place].kind == RIGHT for place in self.places[source])

    def _lines(self, here: Sequence[int]) -> Iterator[RewardLine]:
        """What is trained on, and what was returned beside it."""
        infos = self._infos(here)
        groups = np.array([self.run.samples[place].row for place in here])
        for column, (name, weight) in enumerate(self.rewards.weights.items()):
            present_B = self.rewards.present_BK[here, column]
            values = self.rewards.values_BK[here, column][present_B]
            if self.settings is None:  # verl's managers repeat a bare number as "acc"
                infos = {k: v for k, v in infos.items() if not np.array_equal(v, values)}
            elif name not in infos:
                continue
            yield RewardLine(name, weight, *_ends(values), _remark(values, groups[present_B]))
        for name, values in infos.items():
            if name not in self.rewards.weights:
                yield RewardLine(name, None, *_ends(values), self._why_unused(name))

    def _why_unused(self, name: str) -> str:
        """The remark on what was returned, and has no weight."""
        if self.settings is None:
            return "not trained on"
        is_missing = all(info.get(name) is None for info in self.run.infos)
        if is_missing and not self.settings.terms:
            # Each number that is returned is a reward, and these few rows never ask for this one.
            return NEVER_APPLIES
        return "not in the sum"

    def _infos(self, here: Sequence[int]) -> Mapping[str, Floats]:
        """{name: numbers} of what was returned for these samples beside a score."""
        infos = [self.run.infos[i] for i in here]
        names = dict.fromkeys(name for info in infos for name in info)
        return {
            name: _numbers(info.get(name) for info in infos)
            for name in names
            if name != "score" and not is_internal(name)
        }


def _numbers(values: Iterable[Any]) -> Floats:
    """Return the numbers among the values; a scorer may also return text, which is not a reward."""
    numbers = []
    for value in values:
        try:
            numbers.append(value_or_error(value))
        except ValueError:
            continue
    return np.array([value for value in numbers if value is not None])


def _ends(values: Floats) -> tuple[float, float]:
    return (values.min(), values.max()) if len(values) else (np.nan, np.nan)


def _remark(values: Floats, groups: Any) -> str:
    if not len(values):
        return NEVER_APPLIES
    if values.min() == values.max():
        return NEVER_VARIES
    varies = any(np.ptp(values[groups == group]) > 0 for group in np.unique(groups))
    return "" if varies else "VARIES ONLY BETWEEN PROMPTS"
