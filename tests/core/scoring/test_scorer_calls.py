"""What is said of a scorer that fails."""

import pytest

from verl_gdpo.scoring.scorer_calls import FunctionFailed, describe

FIELDS = {"uid": "u-1", "data_source": "s", "extra_info": {"index": 17}}
SAMPLE = "reward manager gdpo, prompt uid u-1, data_source 's', extra_info.index 17: "
LIBRARY = "/venv/lib/python3.11/site-packages/aiohttp/connector.py"
REWARDS = "/home/me/rewards.py"


def written_in(file, code, **names):
    """The function `f` of some code, as if it stood in a file."""
    exec(compile(code, file, "exec"), names)
    return names["f"]


def error_of(function):
    with pytest.raises(Exception) as raised:
        function()
    # What called the scorer is no part of it; in a run, that is our own code.
    frames = raised.value.__traceback__
    while frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return raised.value.with_traceback(frames)


connect = written_in(LIBRARY, "def f():\n\n\n    raise OSError('no such host')")


def test_the_line_is_the_users_and_not_that_of_a_library():
    score = written_in(REWARDS, "def f():\n    connect()", connect=connect)
    assert describe(error_of(score), FIELDS) == f"{SAMPLE}OSError: no such host [{REWARDS}:2]"


def test_a_scorer_that_is_installed_has_its_own_line():
    installed = "/venv/lib/python3.11/site-packages/my_rewards.py"
    score = written_in(installed, "def f():\n    connect()", connect=connect)
    failed = FunctionFailed("judge", installed)
    failed.__cause__ = error_of(score)
    assert f"OSError: no such host [{installed}:2]. To go on" in describe(failed, FIELDS)


def test_without_a_line_of_the_user_the_file_is_named():
    failed = FunctionFailed("judge", REWARDS)
    failed.__cause__ = error_of(connect)
    assert f"OSError: no such host [{REWARDS}]. To go on" in describe(failed, FIELDS)
    assert describe(failed.__cause__, FIELDS).endswith(f"[{LIBRARY}:4]")


def test_a_function_of_the_list_is_named_with_what_else_may_be_done():
    failed = FunctionFailed("judge", REWARDS)
    failed.__cause__ = error_of(written_in(REWARDS, "def f():\n    return {}['city']"))
    key = "reward.reward_functions.judge"
    assert describe(failed, FIELDS) == (
        f"{SAMPLE}{key}: KeyError: 'city' [{REWARDS}:2]. To go on without its reward for such a "
        f"sample: +{key}.on_error=missing; without the sample: +{key}.on_error=drop"
    )
