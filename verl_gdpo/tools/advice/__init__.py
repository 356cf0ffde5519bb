"""What GDPO would change for the rewards of a run: shares, orders, and weights that keep shares.

Nothing here says what to train with. docs/advice.md says how often the intervals hold the truth.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from verl_gdpo.algorithm.read_settings import REWARDS, line_of
from verl_gdpo.algorithm.zero import Floats
from verl_gdpo.terminal import printable, render, wrapped
from verl_gdpo.tools.advice.evidence import Evidence, Update

TITLE = "What would GDPO change?"
HEADER = ("reward", "range", "share under GRPO", "GRPO by ranges", "GDPO")
LEGEND = """\
share: of the update, the covariance of the reward's part with the whole; [95 % interval]
GRPO by ranges: the same weights, on rewards that are divided by their ranges"""


class Description(NamedTuple):
    """What GDPO would change: a table of the rewards, sentences, and an override to paste."""

    rows: Sequence[Sequence[str]]  # under `HEADER`
    sentences: Sequence[str]  # the last one says what the weights of `line` do
    line: str

    def __str__(self) -> str:
        """Return it for a terminal."""
        sentences = (wrapped(printable(sentence)) for sentence in self.sentences)
        return "\n".join([render(HEADER, self.rows), LEGEND, "", *sentences, printable(self.line)])


def describe(evidence: Evidence) -> Description:
    """Return the description of the first steps of a run."""
    reversed, untied, tied = (f"{share:.1%}" for share in evidence.changed_orders)
    orders = (
        f"Of the pairs of samples of one prompt, GDPO reverses the order of {reversed}. It orders "
        f"{untied} that GRPO ties, and ties {tied} that GRPO orders."
    )
    weights_K, is_kept = evidence.keeping_weights()
    keeps = "No weights with GRPO's shares were found. These repeat the spreads of the rewards:"
    if is_kept:
        keeps = "With these weights, each reward has under GDPO the share that it has under GRPO:"
    columns = evidence.ranges.items(), *map(_shares, evidence.updates)
    rows = [[name, f"{size:.3g}", *of] for (name, size), *of in zip(*columns, strict=True)]
    rubric = "A rubric counts here as one reward; GDPO normalises each of its criteria."
    sentences = [*[rubric] * evidence.has_rubric, orders, keeps]
    return Description(rows, sentences, _override(evidence, weights_K))


def _shares(update: Update) -> list[str]:
    """Each reward's share with its interval."""
    share_K, interval_2K = update.share_K.round(2) + 0.0, update.interval_2K  # no -0.0
    if interval_2K is None:
        return [f"{share:.0%} (too few groups)" for share in share_K]
    of_rewards = zip(share_K, *interval_2K.round(2) + 0.0, strict=True)
    return [f"{share:.0%} [{low:.0%}, {high:.0%}]" for share, low, high in of_rewards]


def _override(evidence: Evidence, weights_K: Floats) -> str:
    """The override with other weights; what else the run sets of its rewards stays."""
    terms = dict(evidence.settings.rewards_as_written)
    for name, weight in zip(evidence.ranges, weights_K, strict=True):
        rounded, term = float(f"{weight:.3g}"), terms.get(name)
        terms[name] = {**term, "weight": rounded} if isinstance(term, Mapping) else rounded
    return line_of(REWARDS, terms)
