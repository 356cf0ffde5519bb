import os
import threading

import pytest
from scripted_policy import ScriptedPolicy

from verl_gdpo.tools.evaluate import dialogues
from verl_gdpo.tools.evaluate.benchmark import Outcome, Question
from verl_gdpo.tools.evaluate.dialogues import play, start_all
from verl_gdpo.tools.evaluate.results import _notes_of_turns, problems_of


def counting(turns):
    """Asks for a number of turns; an answer is right if it repeats the number of the turn."""
    texts, formats = [], []
    for number in range(turns):
        answer = yield [{"role": "user", "content": f"turn {number} after {texts}"}]
        if answer is None:
            return Outcome({"all": 0.0, "length": 0}, formats)
        texts.append(answer.text)
        formats.append({"right": float(answer.text.startswith(f"turn {number}"))})
    return Outcome({"all": 1.0, "length": sum(map(len, texts))}, formats)


QUESTIONS = [Question(f"q_{k}", "a", lambda k=k: counting(k % 4)) for k in range(9)]


def repeated(messages, seed):
    return f"{messages[-1]['content'].split(' after')[0]} {seed % 1000}"


def played(engine, *, samples=2, max_tokens=100, seed=0, questions=QUESTIONS):
    started = start_all(questions, samples)
    play(started, engine, max_tokens, seed)
    return started


def texts(dialogues):
    return [[record.answer.text for record in one.records] for one in dialogues]


def test_answers_of_a_batch_are_scored_at_once(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    together = threading.Barrier(3, timeout=20)

    def waiting():
        yield [{"role": "user", "content": "turn 0"}]
        together.wait()
        return Outcome({}, [])

    asked = [Question(f"q_{k}", "a", waiting) for k in range(6)]
    played(ScriptedPolicy(repeated), samples=1, questions=asked)


def test_a_line_says_what_has_been_done(monkeypatch, capsys):
    monkeypatch.setattr(dialogues, "SECONDS_BETWEEN_LINES", -1.0)
    played(ScriptedPolicy(repeated))
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "18 of 18 dialogues"


def test_samples_have_streams_of_their_own_that_depend_on_nothing_else():
    first = played(ScriptedPolicy(repeated, batch=1), samples=3)
    again = played(ScriptedPolicy(repeated, batch=8), samples=2)
    other = played(ScriptedPolicy(repeated), samples=2, seed=1)
    assert texts(one for one in first if one.sample < 2) == texts(again) != texts(other)
    drawn = [text for of_one in texts(first) for text in of_one]
    assert len({*drawn}) == len(drawn)


def test_a_prompt_that_leaves_no_room_counts_as_wrong():
    # 6 words may be asked: the first prompt has 5, and the second has 7
    dialogues = played(ScriptedPolicy(repeated, positions=18), samples=1, max_tokens=12)
    lost = [any(record.answer is None for record in one.records) for one in dialogues]
    assert lost == [k % 4 > 1 for k in range(9)]
    assert [one.outcome.scores["all"] for one in dialogues] == [k % 4 < 2 for k in range(9)]


def test_two_questions_with_one_key_are_refused():
    with pytest.raises(ValueError, match="'q_1'"):
        start_all([QUESTIONS[1], QUESTIONS[1]], 1)


def test_a_problem_has_the_mean_over_its_samples_and_the_sums_over_its_answers():
    dialogues = played(ScriptedPolicy(lambda messages, seed: "turn 0"))
    assert [len(one.records) for one in dialogues] == [k % 4 for k in range(9) for _ in (0, 1)]
    found = problems_of(dialogues)["q_2"]  # two turns, of which the answer to the first is right
    assert found.scores == {"all": 1.0, "length": 12.0}
    assert found.answers == {"right": (2.0, 4)}


def test_earlier_turns_that_a_template_renders_anew_are_said():
    def told(turns):
        messages = [{"role": "user", "content": "turn 0"}]
        for number in range(turns):
            answer = yield list(messages)
            messages.append({"role": "assistant", "content": answer.text})
            messages.append({"role": "user", "content": f"turn {number + 1}"})
        return Outcome({"all": 1.0}, [])

    asked = [Question(f"q_{k}", "a", lambda k=k: told(k)) for k in (1, 2, 3)]
    dialogues = played(ScriptedPolicy(repeated), samples=1, questions=asked)
    assert [one.has_earlier_turns for one in dialogues] == [False, True, True]
    (note,) = _notes_of_turns(dialogues)
    assert note.startswith("2 of 3 dialogues have earlier turns of an assistant. The chat template")
    assert _notes_of_turns(played(ScriptedPolicy(repeated))) == []
