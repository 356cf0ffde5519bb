"""Rollout dumps: read step by step, and turned into what the estimator saw."""

import json

import pytest

from verl_gdpo.rollouts import read_rollouts, reward_rows


def line(uid, **changes):
    row = {
        "uid": uid,
        "data_source": "rlla",
        "response_tokens": 3,
        "rewards": {"format": 1.0},
        "advantage": 0.0,
        "is_padding": False,
    }
    return json.dumps({**row, **changes}) + "\n"


def test_steps_come_in_order_from_a_run_or_its_rollouts(tmp_path):
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    for step in (10, 9, 2):
        (rollouts / f"{step}.jsonl").write_text(line(f"p_{step}_0"))
    (rollouts / "notes.jsonl").write_text("not ours")
    for folder in (tmp_path, rollouts):
        assert [(step, rows[0]["uid"]) for step, rows in read_rollouts(folder)] == [
            *((2, "p_2_0"), (9, "p_9_0"), (10, "p_10_0"))
        ]


def test_the_estimators_rows(tmp_path):
    # the second session has two rows: its last one stands for it
    text = line("p_0_0") + line("p_1_0") + line("p_1_1") + line("pad_0_0", is_padding=True)
    (tmp_path / "7.jsonl").write_text(text)
    [(step, rows)] = read_rollouts(tmp_path)
    result = reward_rows(rows, step)
    assert result.step == 7
    assert result.counted_B.tolist() == [True, False, True, False]
    assert result.info(2) == {"format": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no rollout dump"),
        (line("p_0_0") + "{", r"1.jsonl, line 2: not JSON"),
        ('{"uid": "p_0_0", "score": 1.0}\n', r"1.jsonl, line 1: no \['data_source'.*verl-gdpo"),
    ],
)
def test_what_is_no_dump_of_ours_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "1.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_rollouts(tmp_path))
