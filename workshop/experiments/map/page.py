"""Writes docs/when_gdpo_helps.md and the table of all settings.

The templates say the words, and the data the numbers.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from verl_gdpo.tools.advice.rules import AdviceRule, read_rules, rule_of, rules_file
from verl_gdpo.tools.report.page import signed
from workshop.experiments.map import against_trainer, compare, draws, dumps, settings
from workshop.experiments.map.arms import ARMS, FIRST_ARMS
from workshop.experiments.map.compare import MATTERS, VERDICTS, Gain, gain, joint
from workshop.experiments.map.results import OPTIMIZERS, Outcomes
from workshop.experiments.map.settings import SETTINGS
from workshop.experiments.template import template_beside

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "when_gdpo_helps.md"
ALL_SETTINGS = DOCS / "when_gdpo_helps" / "all_settings.md"
NOT_COMPLETE = "not complete"


def write(found: Outcomes) -> None:
    PAGE.write_text(render(found))
    ALL_SETTINGS.write_text(render_all(found))


def render(found: Outcomes) -> str:
    constants = vars(settings) | vars(draws) | vars(compare)
    return template_beside(__file__).render(
        words=Words(found),
        constants=constants,
        arms=ARMS,
        settings=SETTINGS,
        dumps=dumps,
    )


def render_all(found: Outcomes) -> str:
    template = template_beside(__file__, "all_settings.md.jinja")
    return template.render(words=Words(found), settings=SETTINGS)


class Words:
    """What the templates ask for. A sentence names the verdicts that it is true for.

    Raises:
        ValueError: the data have another verdict, so the sentence has to be written anew.
    """

    def __init__(self, found: Outcomes) -> None:
        self.found = found

    def gain(self, setting: str, over: str, *expected: str, arm: str = "gdpo") -> str:
        """Under both optimisers, and checked: what both say together."""
        said = joint(self.found, setting, over, arm)
        if {*expected} - {*VERDICTS}:
            raise ValueError(f"page.md.jinja expects {expected}; verdicts are {VERDICTS}")
        if expected and said not in (*expected, NOT_COMPLETE):
            raise ValueError(
                f"page.md.jinja says {expected} of {setting}: {arm} minus {over}; the data say "
                f"{said!r}, {self._both(setting, over, arm)}"
            )
        return self._both(setting, over, arm)

    def _both(self, setting: str, over: str, arm: str = "gdpo") -> str:
        gains = [gain(self.found, name, setting, over, arm) for name in OPTIMIZERS]
        return " / ".join(map(gain_text, gains))

    def rules(self) -> str:
        """A line for each rule: where it applies, and what GDPO earned there."""
        measured = dumps.read()
        lines = [
            "| your dump shows | train with | settings | GDPO minus GRPO | minus rescaled GRPO |",
            "|---|---|---|---|---|",
        ]
        for rule in read_rules():
            names = [name for name in SETTINGS if rule_of(measured[name]) == rule]
            cells = [self._range(names, over) if names else "-" for over in ("grpo", "grpo_range")]
            row = [rule.symptom + _bounds(rule), rule.train_with, str(len(names)), *cells]
            lines.append(f"| {' | '.join(row)} |")
        return "\n".join(lines)

    def _range(self, names: Sequence[str], over: str) -> str:
        """The smallest and the largest mean of some settings, under both optimisers."""
        ends = []
        for optimizer in OPTIMIZERS:
            means = [gain(self.found, optimizer, name, over).mean for name in names]
            ends.append(f"{signed(min(means), 3)} to {signed(max(means), 3)}")
        said = Counter(joint(self.found, name, over) for name in names)
        counted = ", ".join(f"{number} {word}" for word, number in said.most_common())
        return f"{' / '.join(ends)} ({counted})"

    def rewards(self) -> str:
        """A line for each kind of rewards that many train with."""
        lines = [
            "| rewards | nearest settings | GDPO minus GRPO there | in verl's trainer |",
            "|---|---|---|---|",
        ]
        for rewards in rules_file()["rewards"]:
            gains = "; ".join(self._both(name, "grpo") for name in rewards["nearest"])
            shown = "; ".join(map(against_trainer.trained, rewards["trainer"]))
            row = [rewards["name"], "; ".join(rewards["nearest"]), gains, shown]
            lines.append(f"| {' | '.join(row)} |")
        return "\n".join(lines)

    def beside(self) -> list[against_trainer.Beside]:
        return [*against_trainer.beside(self.found)]

    def against_trainer(self) -> str:
        """A line for each comparison of the trainer, with the error of both optimisers."""
        rows = self.beside()
        lines = [
            "| setting | GDPO minus | of | verl's trainer | one scale | error | Adam | error |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            of = "the small reward" if row.endpoint == "small" else "both shares"
            cells = [
                signed(number, 3)
                for name in OPTIMIZERS
                for number in (row.of_optimizer[name], row.error(name))
            ]
            rival = "GRPO" if row.rival == "grpo" else "rescaled GRPO"
            parts = [against_trainer.SAME[row.setting], rival, of, signed(row.trainer, 3), *cells]
            lines.append(f"| {' | '.join(parts)} |")
        errors = [f"{against_trainer.mean_error(rows, name):.3f}" for name in OPTIMIZERS]
        lines.append(f"| mean of the absolute errors | | | | | {errors[0]} | | {errors[1]} |")
        return "\n".join(lines)

    def other_arms(self) -> str:
        """A line for each estimator that no rule rests on: GDPO minus it, over all settings."""
        lines = [
            f"| estimator | mean: one scale / Adam | {' | '.join(VERDICTS)} |",
            "|---" * (2 + len(VERDICTS)) + "|",
        ]
        for arm in (arm for arm in ARMS if arm not in FIRST_ARMS):
            said = Counter(joint(self.found, name, arm) for name in SETTINGS)
            cells = [self.mean_of(arm), *(str(said[verdict]) for verdict in VERDICTS)]
            lines.append(f"| `{arm}` | {' | '.join(cells)} |")
        return "\n".join(lines)

    def mean_of(self, arm: str) -> str:
        """GDPO minus an arm, over all settings, under both optimisers."""
        means = (
            fmean(gain(self.found, optimizer, name, arm).mean for name in SETTINGS)
            for optimizer in OPTIMIZERS
        )
        return " / ".join(signed(mean, 3) for mean in means)

    def parts(self, *names: str) -> str:
        """Lines of what rescaling adds to GRPO, and GDPO to that."""
        lines = []
        for name in names:
            cells = [self._both(name, "grpo", "grpo_range"), self._both(name, "grpo_range")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def recovered(self, setting: str, by: str = "grpo_range") -> str:
        """The share of GDPO's gain over GRPO that a rival has, under both optimisers."""
        shares = []
        for optimizer in OPTIMIZERS:
            part = gain(self.found, optimizer, setting, "grpo", by).mean
            shares.append(f"{100 * part / gain(self.found, optimizer, setting).mean:.0f} %")
        return " / ".join(shares)

    def number(self, over: str, *verdicts: str, optimizer: str = "") -> int:
        """Of settings in which GDPO minus `over` has one of these verdicts."""
        return sum(
            (
                gain(self.found, optimizer, name, over).verdict
                if optimizer
                else joint(self.found, name, over)
            )
            in verdicts
            for name in SETTINGS
        )

    def alike(self, over: str) -> int:
        """Of settings in which the mean difference matters under no optimiser."""
        return sum(
            all(abs(gain(self.found, one, name, over).mean) < MATTERS for one in OPTIMIZERS)
            for name in SETTINGS
        )

    def of_rule(self, name: str) -> str:
        """The smallest and the largest mean of GDPO minus GRPO, under any optimiser."""
        measured = dumps.read()
        means = [
            gain(self.found, one, setting, "grpo").mean
            for one in OPTIMIZERS
            for setting in SETTINGS
            if rule_of(measured[setting]).name == name
        ]
        return f"{signed(min(means), 2)} to {signed(max(means), 2)}"

    def at_least(self, optimizer: str, over: str) -> int:
        """Of settings in which the mean difference is at least what matters."""
        means = (gain(self.found, optimizer, name, over).mean for name in SETTINGS)
        return sum(mean >= MATTERS for mean in means)

    def largest(self, optimizer: str, over: str) -> str:
        """The mean difference that is furthest from 0."""
        means = (gain(self.found, optimizer, name, over).mean for name in SETTINGS)
        return signed(max(means, key=abs), 3)

    def half_width(self, optimizer: str) -> str:
        """The mean half width of the intervals, of GDPO minus GRPO and where draws are complete."""
        gains = [gain(self.found, optimizer, name) for name in SETTINGS]
        complete = [one for one in gains if len(one.of_draw) == draws.DRAWS and any(one.of_draw)]
        return f"{fmean(one.half_width for one in complete or gains):.3f}"

    def draws_done(self) -> str:
        done = Counter(
            len(gain(self.found, name, setting, over).of_draw)
            for name in OPTIMIZERS
            for setting in SETTINGS
            for over in ("grpo", "grpo_range")
        )
        if [*done] == [draws.DRAWS]:
            return f"All settings have {draws.DRAWS} draws."
        parts = [f"{number} have {count}" for count, number in sorted(done.items(), reverse=True)]
        return (
            f"Of {sum(done.values())} comparisons of GDPO with GRPO and rescaled GRPO, "
            f"{', '.join(parts)} draws."
        )

    def all_settings(self) -> str:
        lines = [
            "| setting | rule | GDPO minus GRPO: one scale | Adam | both | minus rescaled GRPO: "
            "one scale | Adam | both |",
            "|---" * 8 + "|",
        ]
        measured = dumps.read()
        for name in SETTINGS:
            cells = []
            for over in ("grpo", "grpo_range"):
                cells += [gain_text(gain(self.found, o, name, over)) for o in OPTIMIZERS]
                cells.append(joint(self.found, name, over))
            lines.append(f"| {' | '.join([name, rule_of(measured[name]).name, *cells])} |")
        return "\n".join(lines)


def gain_text(one: Gain) -> str:
    """The difference, and the interval that holds for all settings at once."""
    if not any(one.of_draw):
        return "0, the same" if one.of_draw else "not yet"
    part = "" if len(one.of_draw) == draws.DRAWS else f" ({len(one.of_draw)} draws)"
    return f"{signed(one.mean, 3)} [{signed(one.low, 3)}, {signed(one.high, 3)}]{part}"


def _bounds(rule: AdviceRule) -> str:
    parts = []
    for name, (low, high) in rule.bounds.items():
        above = f"{low:g} or more" if high == float("inf") else ""
        parts.append(f"`{name}` {above or f'{low:g} to {high:g}'}")
    return f" ({', '.join(parts)})" if parts else ""
