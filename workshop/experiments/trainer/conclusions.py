"""What may be said of the results: the protocol's table of outcomes, as code."""

from verl_gdpo.tools.report.page import signed
from workshop.experiments.trainer.compare import Difference, Results, difference
from workshop.experiments.trainer.settings import SETTINGS

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
    return f"{signed(gain.mean)} [{signed(gain.low)}, {signed(gain.high)}]"


def _not_complete(what: str, *gains: Difference) -> str:
    done = min(len(gain.of_seed) for gain in gains)
    return f"{what}: {done} of {len(gains[0].seeds)} seeds are done, {UNDECIDED}"


def _against_grpo(found: Results) -> str:
    main, control = (difference(found, name, "gdpo", "grpo") for name in (MAIN, CONTROL))
    if main.verdict == "not complete":
        return _not_complete("Ranges 20 and 1", main)
    gain = f"With ranges 20 and 1, GDPO minus GRPO is {_numbers(main)} of the small reward"
    if main.low <= 0:
        return (
            f"{gain} ({main.verdict}): verl's trainer does not show the effect of the simulation "
            "at this size."
        )
    if control.verdict == "not complete":
        return f"{gain}. The control with equal ranges is not complete."
    equal = f"With equal ranges it is {_numbers(control)}"
    if control.low > 0:
        return (
            f"{gain}. {equal}: GDPO helps here whatever the ranges, which the simulation does not "
            "explain."
        )
    return (
        f"{gain}. {equal} ({control.verdict}). So GDPO helps where the larger range belongs to the "
        "other reward, as in the simulation."
    )


def _against_rescaled(found: Results) -> str:
    gain = difference(found, MAIN, "gdpo", "grpo_rescaled")
    if gain.verdict == "not complete":
        return _not_complete("Ranges 20 and 1, rescaled GRPO", gain)
    says = {
        "difference": "GDPO does more than rescale" if gain.low > 0 else "Rescaling is better",
        "difference, but none that matters": "Dividing by the range does nearly the same",
        "no difference that matters": "Dividing by the range does the same, and is simpler",
        "open": "Which of them is better is open",
    }
    return (
        "With ranges 20 and 1, GDPO minus GRPO on rewards that are divided by their ranges is "
        f"{_numbers(gain)}. {says[gain.verdict]}."
    )


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
