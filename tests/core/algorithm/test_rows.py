"""The rows of a batch: keys, sessions, padding, and errors of the reward manager."""

import numpy as np
import pytest

from verl_gdpo.algorithm.rows import ABSENT, BatchRows, RowKey, columns_of
from verl_gdpo.algorithm.values import AGENT_SCORE_KEY, ERROR_KEY, RewardError


def rows_with(infos, keys, padding=()):
    is_padding = [row in padding for row in range(len(infos))]
    return BatchRows.from_keys(keys, infos, ["d"] * len(infos), is_padding)


def test_what_identifies_a_row():
    assert RowKey.of_text("a_b_3_0") == RowKey("a_b", 3, 0)
    assert [str(RowKey.of_text(key)) for key in ("a_b_3_0", "a__0_12")] == ["a_b_3_0", "a__0_12"]
    for key in ("a", "a_0", "a_0_b", "row 0 of a_b.parquet"):
        with pytest.raises(ValueError, match=f"^key '{key}': expected UID_SESSION_INDEX"):
            RowKey.of_text(key)
    # trainers with uids alone: a row is a session
    keys = RowKey.of_uids(["a_b", 7, "a_b"])
    assert keys == [RowKey("a_b", 0, 0), RowKey("7", 0, 0), RowKey("a_b", 1, 0)]


@pytest.mark.parametrize("kind", [list, np.array])
def test_columns_of_a_batch_without_keys(kind):
    rows = BatchRows.from_columns({"a": kind([1.0, 2.0]), "b": kind([3, 4])}, ["u", "u"])
    assert len(rows) == 2 and rows.counted_B.all() and rows.session_B.tolist() == [0, 1]
    assert rows.extra_info(1) == {"a": 2.0, "b": 4}
    assert [type(value) for value in rows.extra_info(1).values()] == [float, int]
    rows.raise_on_error()  # no row reports one
    assert rows.label(1) == "row 1" and rows.uids == ["u", "u"]


def test_the_last_row_of_a_session_stands_for_it():
    rows = rows_with([{"a": 1.0}] * 4, ["u_0_1", "u_1_0", "u_0_10", "u_0_2"])
    assert rows.session_B.tolist() == [2, 1, 2, 2]
    assert rows.counted_B.tolist() == [False, True, True, False]
    assert rows.samples == [1, 2]
    assert rows.over_sessions(np.array([1, 20, 300, 4000])).tolist() == [0, 20, 4301, 0]


def test_columns_say_which_rows_lack_a_key():
    of_loop = {AGENT_SCORE_KEY: 0.5}
    infos = [{"a": 1.0}, {"b": None, "a": 2.0}, of_loop]
    assert columns_of(infos) == {"a": [1.0, 2.0, ABSENT], "b": [ABSENT, None, ABSENT]}
    rows = rows_with(infos, ["u_0_0", "u_1_0", "u_2_0"])
    assert [rows.extra_info(row) for row in range(3)] == [*infos[:2], {}]
    assert rows.own_scores == {2: 0.5}
    assert "returned" in rows.origin_of(0) and "reward_score=0.5" in rows.origin_of(2)


def test_an_error_of_the_reward_manager_stops_the_run():
    failed = {ERROR_KEY: "uid u: reward 'a' is nan"}
    keys = ["u_0_0", "u_1_0"]
    with pytest.raises(RewardError, match=r"1 of 2 samples .* uid u: reward 'a' is nan"):
        rows_with([{"a": 1.0}, failed], keys).raise_on_error()
    rows_with([{"a": 1.0}, failed], keys, padding=[1]).raise_on_error()  # a copy of another row
