"""What may be said of the results: the protocol's table of outcomes, as code."""

from experiments.trainer.compare import Difference, Results, difference
from experiments.trainer.settings import SETTINGS

UNDECIDED = "so nothing is claimed."  # how a sentence ends that says nothing
MAIN, CONTROL, BY_PROMPT, TOOL_RL = SETTINGS


def conclusions(found: Results) -> list[str]:
    """One sentence for each line of the protocol; a setting that is not complete claims nothing."""
    return [
        _against_grpo(found),
        _against_rescaled(found),
        _by_prompt(found),
        _tool_rl(found),
    ]


def _numbers(gain: Difference) -> str:
    return f"{gain.mean:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"


def _not_complete(what: str, *gains: Difference) -> str:
    done = min(len(gain.of_seed) for gain in gains)
    return f"{what}: {done} of {len(gains[0].seeds)} seeds are done, {UNDECIDED}"


def _against_grpo(found: Results) -> str:
    main, control = (difference(found, name, "gdpo", "grpo") for name in (MAIN, CONTROL))
    what = "Ranges 20 and 1, GDPO against GRPO"
    if main.verdict == "not complete":
        return _not_complete(what, main)
    if main.low <= 0:
        return (
            f"{what}: verl's trainer does not show the effect of the simulation at this size "
            f"({_numbers(main)}, {main.verdict})."
        )
    gain = f"GDPO earns {_numbers(main)} more of the small reward than GRPO with ranges 20 and 1"
    if control.verdict == "not complete":
        return f"{gain}; the control with equal ranges is not complete."
    if control.low > 0:
        return (
            f"{gain}, and {_numbers(control)} with equal ranges: it helps here whatever the "
            "ranges, which the simulation does not explain."
        )
    return (
        f"{gain}. With equal ranges it is {_numbers(control)} ({control.verdict}). So GDPO helps "
        "where the larger range belongs to the other reward, as in the simulation."
    )


def _against_rescaled(found: Results) -> str:
    gain = difference(found, MAIN, "gdpo", "grpo_rescaled")
    what = "Ranges 20 and 1, GDPO against GRPO on rewards that are divided by their ranges"
    if gain.verdict == "not complete":
        return _not_complete(what, gain)
    says = {
        "difference": "GDPO does more than rescale" if gain.low > 0 else "rescaling is better",
        "no difference that matters": "dividing by the range does the same, and is simpler",
        "open": "which of them is better is open",
    }
    return f"{what}: {_numbers(gain)}; {says[gain.verdict]}."


def _by_prompt(found: Results) -> str:
    gains = [difference(found, BY_PROMPT, "gdpo", other) for other in ("grpo", "grpo_rescaled")]
    what = "Ranges that depend on the prompt"
    if any(gain.verdict == "not complete" for gain in gains):
        return _not_complete(what, *gains)
    numbers = (
        f"GDPO minus GRPO is {_numbers(gains[0])}, and minus rescaled GRPO {_numbers(gains[1])}"
    )
    if all(gain.low > 0 for gain in gains):
        return f"{what} are GDPO's own ground: {numbers}."
    return f"{what}: that GDPO is above both others is not shown. {numbers}."


def _tool_rl(found: Results) -> str:
    gains = [difference(found, TOOL_RL, "gdpo", other) for other in ("grpo", "grpo_rescaled")]
    what = "ToolRL's rewards, with the policy and the rows of the run without a GPU"
    if any(gain.verdict == "not complete" for gain in gains):
        return _not_complete(what, *gains)
    return (
        f"{what}: for the format, GDPO minus GRPO is {_numbers(gains[0])} ({gains[0].verdict}), "
        f"and minus rescaled GRPO {_numbers(gains[1])} ({gains[1].verdict})."
    )
