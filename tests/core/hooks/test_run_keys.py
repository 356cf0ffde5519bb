"""Keys of ours that serve whoever starts a run."""

import math

import pytest

from verl_gdpo.hooks.run_keys import hang_seconds


@pytest.mark.parametrize(("minutes", "seconds"), [(0, 0.0), (30, 1800.0), (0.5, 30.0)])
def test_minutes_in_seconds(minutes, seconds):
    assert hang_seconds(minutes) == seconds


@pytest.mark.parametrize("minutes", [-1, math.nan, True, "30", None])
def test_what_is_no_number_of_minutes_is_refused(minutes):
    with pytest.raises(ValueError, match=r"trainer.hang_minutes=.*: expected minutes, such as 30"):
        hang_seconds(minutes)
