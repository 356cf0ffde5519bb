"""Keys of ours that serve whoever starts a run; a run with gdpo knows them."""

# Of the whole configuration: the keys whose change is wanted in a resume.
ALLOW_CHANGE = "allow_change"
# Of the whole configuration, in our recipes.
OF_RECIPES = ("arm", "data_dir", "recipes", "run_dir", "seed")
# Of the block `trainer`: after so many minutes without a step, the launcher ends the run.
HANG_MINUTES = "hang_minutes"


def hang_seconds(minutes: object) -> float:
    """Return a value of `trainer.hang_minutes` in seconds; 0 for a run that is never ended.

    Raises:
        ValueError: it is something else than a number of minutes.
    """
    message = f"trainer.{HANG_MINUTES}={minutes!r}: expected minutes, such as 30, or 0 for none"
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)):
        raise ValueError(message)
    if not minutes >= 0:  # NaN too
        raise ValueError(message)
    return 60.0 * minutes
