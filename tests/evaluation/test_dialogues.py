import os
import threading

import pytest
from scripted_policy import ScriptedPolicy

from verl_gdpo.evaluation import dialogues
from verl_gdpo.evaluation.dialogues import play, replay, start_all
from verl_gdpo.evaluation.questions import Question
from verl_gdpo.evaluation.records import Answers
from verl_gdpo.evaluation.results import problems_of


class Counting:
    """Asks for a number of turns; an answer is right if it repeats the number of the turn."""

    def __init__(self, turns):
        self.turns, self.said, self.is_wrong = turns, [], False

    def prompt(self):
        if self.is_wrong or len(self.said) == self.turns:
            return None
        return [{"role": "user", "content": f"turn {len(self.said)} after {self.said}"}]

    def take(self, answer):
        self.said.append(answer.text)
        return {"right": float(answer.text.startswith(f"turn {len(self.said) - 1}"))}

    def abandon(self):
        self.is_wrong = True

    def scores(self):
        return {"all": float(not self.is_wrong), "length": sum(map(len, self.said))}


QUESTIONS = [Question(f"q_{k}", "a", lambda k=k: Counting(k % 4)) for k in range(9)]


def repeated(messages, seed):
    return f"{messages[-1]['content'].split(' after')[0]} {seed % 1000}"


def played(folder, engine, *, samples=2, max_tokens=100, seed=0):
    started = start_all(QUESTIONS, samples)
    answers = Answers(folder)
    try:
        replay(started, answers.known)
        play(started, engine, answers, max_tokens, seed)
    finally:
        answers.close()
    return started


def outcome(dialogues):
    return [(one.place, one.records, one.scores) for one in dialogues]


def test_every_dialogue_reaches_its_end(tmp_path):
    dialogues = played(tmp_path, ScriptedPolicy(repeated))
    assert [len(one.records) for one in dialogues] == [k % 4 for k in range(9) for _ in (0, 1)]
    assert all(scores == {"right": 1.0} for one in dialogues for scores in one.of_answers)


def test_a_kill_after_any_answer_gives_the_same(tmp_path):
    (tmp_path / "w").mkdir()
    whole = played(tmp_path / "w", ScriptedPolicy(repeated))
    total = sum(len(one.records) for one in whole)
    for stop in range(total):
        folder = tmp_path / str(stop)
        folder.mkdir()
        with pytest.raises(KeyboardInterrupt):
            played(folder, ScriptedPolicy(repeated, stop_after=stop))
        engine = ScriptedPolicy(repeated, batch=4)
        assert outcome(played(folder, engine)) == outcome(whole)
        assert engine.asked == total - stop


def test_answers_of_a_batch_and_those_on_the_disk_are_scored_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    together = threading.Barrier(3, timeout=20)
    take = Counting.take

    def waiting(self, answer):
        together.wait()
        return take(self, answer)

    monkeypatch.setattr(Counting, "take", waiting)
    asked = [Question(f"q_{k}", "a", lambda: Counting(1)) for k in range(6)]
    monkeypatch.setitem(globals(), "QUESTIONS", asked)
    first = played(tmp_path, ScriptedPolicy(repeated), samples=1)
    again = ScriptedPolicy(repeated)
    assert outcome(played(tmp_path, again, samples=1)) == outcome(first)
    assert again.asked == 0


def test_a_line_says_what_has_been_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dialogues, "SECONDS_BETWEEN_LINES", -1.0)
    played(tmp_path, ScriptedPolicy(repeated))
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "evaluate: 18 of 18 dialogues, 24 answers, 0 s left"


def test_samples_have_streams_of_their_own_that_depend_on_nothing_else(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    first = played(tmp_path / "a", ScriptedPolicy(repeated, batch=1), samples=3)
    again = played(tmp_path / "b", ScriptedPolicy(repeated, batch=8), samples=2)
    other = played(tmp_path / "c", ScriptedPolicy(repeated), samples=2, seed=1)
    texts = [[record.answer.text for record in one.records] for one in first]
    of_two = [text for text, one in zip(texts, first, strict=True) if one.sample < 2]
    assert of_two == [[record.answer.text for record in one.records] for one in again]
    assert of_two != [[record.answer.text for record in one.records] for one in other]
    drawn = [text for of_one in texts for text in of_one]
    assert len({*drawn}) == len(drawn)


def test_a_prompt_that_leaves_no_room_counts_as_wrong(tmp_path):
    # 6 words may be asked: the first prompt has 5, and the second has 7
    engine = ScriptedPolicy(repeated, positions=18)
    dialogues = played(tmp_path, engine, samples=1, max_tokens=12)
    assert [one.is_too_long for one in dialogues] == [k % 4 > 1 for k in range(9)]
    assert [one.scores["all"] for one in dialogues] == [k % 4 < 2 for k in range(9)]
    again = ScriptedPolicy(repeated, positions=18)
    assert outcome(played(tmp_path, again, samples=1, max_tokens=12)) == outcome(dialogues)
    assert again.asked == 0


def test_answers_that_nobody_asks_for_are_refused(tmp_path):
    played(tmp_path, ScriptedPolicy(repeated), samples=2)
    with pytest.raises(ValueError, match="belong to no dialogue, such as Place"):
        played(tmp_path, ScriptedPolicy(repeated), samples=1)


def test_two_questions_with_one_key_are_refused():
    with pytest.raises(ValueError, match="'q_1'"):
        start_all([QUESTIONS[1], QUESTIONS[1]], 1)
    with pytest.raises(ValueError, match="no questions"):
        start_all([], 1)


def test_a_problem_has_the_mean_over_its_samples_and_the_sums_over_its_answers(tmp_path):
    dialogues = played(tmp_path, ScriptedPolicy(lambda messages, seed: "turn 0"))
    found = problems_of(dialogues)["q_2"]  # two turns, of which the answer to the first is right
    assert found.scores == {"all": 1.0, "length": 12.0}
    assert found.answers == {"right": (2.0, 4)}
