"""Reading dumps, and making the estimator's rows from them."""

import json

import pytest

from verl_gdpo.tools.run_folder.dump_reader import data_sources, dump_files, read_dump, reward_rows


def line(uid, **changes):
    row = {
        "uid": uid,
        "group": "p",
        "session": 0,
        "data_source": "rlla",
        "response_tokens": 5,
        "trained_tokens": 3,
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
    for stray in ("notes", "\u00b2"):  # the latter is a digit, and no number
        (rollouts / f"{stray}.jsonl").write_text("not ours")
    for folder in (tmp_path, rollouts):
        files, unfinished = dump_files(folder)
        assert [path.name for path in files] == ["2.jsonl", "9.jsonl", "10.jsonl"]
        assert unfinished == []


def test_the_estimators_rows(tmp_path):
    # the second session has two rows: its last one stands for it
    text = line("p_0_0") + line("p_1_0") + line("p_1_1") + line("pad_0_0", is_padding=True)
    (tmp_path / "7.jsonl").write_text(text)
    result = reward_rows(read_dump(tmp_path / "7.jsonl"), 7)
    assert result.step == 7
    assert result.counted_B.tolist() == [True, False, True, False]
    assert result.extra_info(2) == {"format": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no dump"),
        (line("p_0_0") + "{\n", r"1.jsonl, line 2: Expecting"),
        ('{"uid": "p_0_0", "score": 1.0}\n', r"1.jsonl, line 1: no \['group'.*verl-gdpo"),
        ("1\n", r"1.jsonl, line 1: no \['uid'.*verl-gdpo"),
        (line("p_0_0") + "{", r"1.jsonl: no dump here is complete: verl is still"),
    ],
)
def test_what_is_no_dump_of_ours_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "1.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_dump(dump_files(tmp_path)[0][0])


@pytest.mark.parametrize("end", ["", line("p_0_0") + "{", line("p_0_0").rstrip()])
def test_dumps_without_an_end_are_left_out(tmp_path, end):
    for step in (1, 2, 10):
        (tmp_path / f"{step}.jsonl").write_text(line(f"p_{step}_0"))
    (tmp_path / "11.jsonl").write_text(end)
    files, unfinished = dump_files(tmp_path)
    assert [path.stem for path in files] == ["1", "2", "10"]
    assert unfinished == [tmp_path / "11.jsonl"]
    # of a start before the resumed one that was stopped in step 11
    (tmp_path / "12.jsonl").write_text(line("p_0_0"))
    files, unfinished = dump_files(tmp_path)
    assert [path.stem for path in files] == ["1", "2", "10", "12"]
    assert unfinished == [tmp_path / "11.jsonl"]


def test_the_data_sources_of_dumps(tmp_path):
    (tmp_path / "1.jsonl").write_text(line("p_0_0") + line("q_0_0", data_source='a "b" \u00e9'))
    said = 'not "data_source": "said", but a text'
    (tmp_path / "2.jsonl").write_text(line("p_0_0", data_source="gsm8k", output=said))
    assert data_sources(dump_files(tmp_path)[0]) == {"rlla", 'a "b" \u00e9', "gsm8k"}
    without = {key: value for key, value in json.loads(line("p_0_0")).items() if "data" not in key}
    (tmp_path / "2.jsonl").write_text(json.dumps(without) + "\n")
    assert data_sources([tmp_path / "2.jsonl"]) is None
