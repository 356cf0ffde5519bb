"""What may be said of the results: the protocol's table of outcomes, as code."""

from workshop.experiments.trainer.compare import (
    Difference,
    Results,
    declared,
    difference,
    share,
)

UNDECIDED = "so nothing is claimed."  # how a sentence ends that says nothing
MAIN, CONTROL, BY_PROMPT, TOOL_RL = "20_to_1", "1_to_1", "by_prompt", "tool_rl"


def conclusions(found: Results) -> list[str]:
    """One sentence for each line of the protocol; a setting that is not complete claims nothing."""
    return [
        _against_grpo(found),
        _against_rescaled(found),
        _by_prompt(found),
        _tool_rl(found),
    ]


def _not_complete(what: str, *gains: Difference) -> str:
    done = min(len(gain.of_seed) for gain in gains)
    return f"{what}: {done} of {len(gains[0].seeds)} seeds are done, {UNDECIDED}"


def _against_grpo(found: Results) -> str:
    main, control = (difference(found, name, "gdpo", "grpo") for name in (MAIN, CONTROL))
    if main.verdict == "not complete":
        return _not_complete("Ranges 20 and 1", main)
    gain = f"With ranges 20 and 1, GDPO minus GRPO is {main.text(2)} of the small reward"
    if main.low <= 0:
        return (
            f"{gain} ({main.verdict}): verl's trainer does not show the effect of the simulation "
            "at this size."
        )
    if control.verdict == "not complete":
        return f"{gain}. The control with equal ranges is not complete."
    equal = f"With equal ranges it is {control.text(2)}"
    if control.low > 0:
        return (
            f"{gain}. {equal}: GDPO helps here whatever the ranges, which the simulation does not "
            "explain."
        )
    return (
        f"{gain}. {equal} ({control.verdict}). So GDPO helps the small reward where the larger "
        f"range belongs to the other one. {_price(found)}"
    )


def _price(found: Results) -> str:
    """What the gain of the small reward costs: endpoints of which nothing is claimed."""
    of_large, of_score = (
        difference(found, MAIN, "gdpo", "grpo", endpoint, level=0.95).text(2)
        for endpoint in (share("large"), declared)
    )
    return (
        f"Of the large reward it is {of_large}, and of the score that was declared, 20 times one "
        f"and 1 time the other, {of_score}; of these two nothing is claimed. GDPO with weights 20 "
        "and 1 was not trained."
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
        f"{gain.text(2)} of the small reward. {says[gain.verdict]}."
    )


def _by_prompt(found: Results) -> str:
    gains = [difference(found, BY_PROMPT, "gdpo", other) for other in ("grpo", "grpo_rescaled")]
    what = "Ranges that depend on the prompt"
    if any(gain.verdict == "not complete" for gain in gains):
        return _not_complete(what, *gains)
    numbers = (
        f"GDPO minus GRPO is {gains[0].text(2)} of the small reward, and minus rescaled GRPO "
        f"{gains[1].text(2)}"
    )
    if all(gain.low > 0 for gain in gains):
        return (
            f"{what}, where both rewards are hard, are GDPO's own ground: {numbers}. We know of no "
            "real reward of this kind, and GRPO on rewards divided by each prompt's known range "
            "was not trained."
        )
    return f"{what}: that GDPO is above both others is not shown. {numbers}."


def _tool_rl(found: Results) -> str:
    gains = [difference(found, TOOL_RL, "gdpo", other) for other in ("grpo", "grpo_rescaled")]
    what = "ToolRL's rewards, with the policy and the rows of the run without a GPU"
    if any(gain.verdict == "not complete" for gain in gains):
        return _not_complete(what, *gains)
    return (
        f"{what}: for the format, the small reward, GDPO minus GRPO is {gains[0].text()} "
        f"({gains[0].verdict}), and minus rescaled GRPO {gains[1].text()} ({gains[1].verdict})."
    )
