"""Which samples `on_error: drop` takes out of a batch, and when too many have failed."""

import pytest

from verl_gdpo.algorithm.failed_samples import (
    drop_failed,
    empty_dropped,
    empty_sums_of_failed,
    refuse_failures,
)
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.values import DROPPED, NOTES_KEY, RewardError


def note(is_dropped):
    return {"failed_judge": float(is_dropped), DROPPED: float(is_dropped), "judge_seconds": 9.0}


def rows_of(*of_rows):
    """Rows of (key, whether it is dropped, or None without notes)."""
    infos = [{} if failed is None else {NOTES_KEY: note(failed)} for _, failed in of_rows]
    keys = [key for key, _ in of_rows]
    return BatchRows.from_keys(keys, infos, ["d"] * len(keys), [False] * len(keys))


def test_a_dropped_sample_leaves_with_all_rows_of_its_session():
    rows = rows_of(("u_0_0", True), ("u_0_1", True), ("u_1_0", False), ("u_2_0", False))
    left = drop_failed(rows, smallest=2)
    assert left.is_padding_B.tolist() == [True, True, False, False]
    assert left.samples == [2, 3]
    assert [each[DROPPED] for each in left.notes] == [1.0, 0.0, 0.0]  # one of each session


@pytest.mark.parametrize(("smallest", "left"), [(2, [1, 2, 3]), (3, [3])])
def test_a_group_leaves_as_a_whole_if_too_few_are_left(smallest, left):
    # w was small before anything failed, and has no failed sample
    rows = rows_of(("u_0_0", True), ("u_1_0", False), ("u_2_0", False), ("w_0_0", False))
    result = drop_failed(rows, smallest)
    assert result.samples == left
    assert sum(each[DROPPED] for each in result.notes) == 4 - len(left)
    assert sum(each["failed_judge"] for each in result.notes) == 1


def test_a_sample_without_notes_leaves_with_its_group_and_gets_none():
    result = drop_failed(rows_of(("u_0_0", True), ("u_1_0", None)), smallest=2)
    assert result.samples == [] and len(result.notes) == 1


def test_too_many_failed_samples():
    notes = [note(True), note(False), note(False), note(False)]
    refuse_failures(notes, 0.25, "of step 7")
    refuse_failures([], 0.0, "of step 7")
    with pytest.raises(
        RewardError, match=r"failed judge: 25% .* of step 7, and .*max_failed=0.2\."
    ):
        refuse_failures(notes, 0.2, "of step 7")
    named = [{"failed_style_judge": 1.0}]
    with pytest.raises(RewardError, match=r"reward_functions: failed style_judge: 100%"):
        refuse_failures(named, 0.2, "of step 7")
    # durations are no shares
    refuse_failures([{"judge_seconds": 9.0}], 0.0, "of step 7")


def test_all_values_of_a_dropped_sample_become_none():
    infos = {"a": [1.0, 2.0, 3.0], NOTES_KEY: [note(True), note(False), None]}
    empty_dropped(infos)
    assert infos == {"a": [None, 2.0, 3.0], NOTES_KEY: [None, note(False), None]}
    without = {"a": [1.0]}
    empty_dropped(without)
    assert without == {"a": [1.0]}


def test_the_sum_of_a_sample_that_failed_counts_nowhere():
    notes = [{"failed_judge": 1.0}, {"failed_judge": 0.0}, None]
    infos = {"reward": [1.0, 2.0, 3.0], "right": [1.0, 1.0, 1.0], NOTES_KEY: notes}
    empty_sums_of_failed(infos)
    assert infos == {"reward": [None, 2.0, 3.0], "right": [1.0, 1.0, 1.0], NOTES_KEY: notes}
