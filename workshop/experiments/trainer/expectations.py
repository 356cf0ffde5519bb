"""What the two protocols expect of a comparison, beside what was found."""

from collections.abc import Mapping

from workshop.experiments.trainer.compare import Difference
from workshop.experiments.trainer.pictures import NAMES
from workshop.experiments.trainer.settings import SETTINGS

# {(setting, the arm that is subtracted from GDPO): the protocol's words, and their two numbers}
Expected = Mapping[tuple[str, str], tuple[str, float, float]]
FIRST: Expected = {
    ("20_to_1", "grpo"): ("+0.15 to +0.21", 0.15, 0.21),
    ("20_to_1", "grpo_rescaled"): ("within 0.03", -0.03, 0.03),
    ("1_to_1", "grpo"): ("within 0.02", -0.02, 0.02),
    ("by_prompt", "grpo"): ("+0.05 or more", 0.05, 1.0),
    ("by_prompt", "grpo_rescaled"): ("+0.05 or more", 0.05, 1.0),
}
SECOND: Expected = {
    ("gsm8k", "grpo"): ("+0.02 or more", 0.02, 1.0),
    ("gsm8k", "grpo_rescaled"): ("within 0.02", -0.02, 0.02),
    ("maths", "grpo"): ("+0.02 or more", 0.02, 1.0),
    ("maths", "grpo_rescaled"): ("within 0.02", -0.02, 0.02),
    ("maths_if_correct", "grpo"): ("-0.02 to +0.04", -0.02, 0.04),
    ("maths_if_correct", "grpo_rescaled"): ("within 0.02", -0.02, 0.02),
    ("tool_rl_seeds", "grpo"): ("within 0.02", -0.02, 0.02),
    ("tool_rl_seeds", "grpo_rescaled"): ("within 0.02", -0.02, 0.02),
}


def table(expected: Expected, gains: Mapping[tuple[str, str, str], Difference]) -> str:
    """A line for each expectation."""
    lines = ["| setting | GDPO minus | expected | found | |", "|---|---|---|---|---|"]
    for (setting, other), (text, low, high) in expected.items():
        gain = gains[setting, "gdpo", other]
        row = [SETTINGS[setting].title, NAMES[other], text, gain.text(), _held(gain, low, high)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _held(gain: Difference, low: float, high: float) -> str:
    """What the whole interval says: a mean that lies well may be chance."""
    if gain.verdict == "not complete":
        return "not complete"
    if low <= gain.low and gain.high <= high:
        return "as expected"
    return "**missed**" if gain.high < low or high < gain.low else "open"
