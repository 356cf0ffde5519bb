"""The warm start: equal bytes, a cache, atomic files, and a tokenizer that verl can load."""

import contextlib
import inspect
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256

import pandas as pd
import pytest
import torch
from tool_rows import numbered

from verl_gdpo.tasks.preparation.prepared_files import write_parquets
from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tasks.tool_rl.rows import make_rows
from workshop.tiny_policy import __main__ as command
from workshop.tiny_policy import train
from workshop.tiny_policy.demonstrations import HABITS, Demonstrations, imperfect
from workshop.tiny_policy.train import MARKER, SHIPPED, make_policy

TINY = {"steps": 3, "batch_size": 4, "hidden_size": 32, "num_hidden_layers": 1}
TWO_CALLS = (
    "<think> x </think>\n<tool_call>\n"
    '{"name": "f", "parameters": {"a": "b-c", "n": 12}}\n'
    '{"name": "g", "parameters": {"n": 3, "a": "d"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    write_parquets({path: numbered(make_rows(300, split="train", seed=0), "train")})
    return path


@pytest.fixture(scope="module")
def policy(data, tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("made") / "policy", data=data, **TINY)


LOCK = ".policy.lock"  # stays: whoever takes it away lets two in


def files_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def hashes(folder):
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_same_arguments_same_bytes(policy, data, tmp_path):
    again = make_policy(tmp_path / "deep" / "again", data=data, **TINY)
    assert hashes(again) == hashes(policy)
    other = make_policy(tmp_path / "other", data=data, seed=1, **TINY)
    assert hashes(other)["model.safetensors"] != hashes(policy)["model.safetensors"]


def test_training_moves_the_weights_and_the_global_random_state_stays(data, tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    longer = make_policy(tmp_path / "policy", data=data, **{**TINY, "steps": 60, "lr": 0.01})
    assert torch.equal(torch.rand(3), expected)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [*make_rows(50, split="test", seed=0)]
    shown = Demonstrations(rows, AutoTokenizer.from_pretrained(longer), random.Random(0))
    model = AutoModelForCausalLM.from_pretrained(longer)
    tensors = [
        {name: torch.tensor([ids]) for name, ids in shown.example(row).items()} for row in range(50)
    ]
    with torch.no_grad():
        loss = sum(model(**example).loss for example in tensors) / 50
    assert loss < 4  # untrained: ln(vocabulary of some 490) = 6.2


def test_the_second_call_returns_at_once(policy, data, monkeypatch):
    monkeypatch.setattr(train, "_train", None)  # calling it would raise
    before = hashes(policy)
    assert make_policy(policy, data=data, **TINY) == policy
    assert hashes(policy) == before


def test_other_arguments_replace_the_policy(data, tmp_path):
    path = make_policy(tmp_path / "policy", data=data, **TINY)
    first = hashes(path)
    make_policy(path, data=data, **{**TINY, "steps": 4})
    assert hashes(path)["model.safetensors"] != first["model.safetensors"]
    assert json.loads((path / MARKER).read_text())["settings"]["steps"] == 4
    (path / MARKER).write_text("damaged")
    make_policy(path, data=data, **TINY)
    assert hashes(path) == first


@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_run_leaves_nothing(data, tmp_path, monkeypatch, exists):
    path = tmp_path / "policy"
    if exists:
        make_policy(path, data=data, **TINY)
    before = hashes(path) if exists else {}

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_show_progress", interrupt)  # after the last step
    with pytest.raises(KeyboardInterrupt):
        make_policy(path, data=data, seed=9, **TINY)
    assert files_in(tmp_path) == (["policy"] if exists else [])
    assert (hashes(path) if exists else {}) == before


@pytest.mark.slow
def test_sigterm_leaves_nothing(data, tmp_path):
    out = tmp_path / "policy"
    command = [sys.executable, "-m", "workshop.tiny_policy", "--out", out, "--data", data]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not files_in(tmp_path):
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert files_in(tmp_path) == []


def test_a_folder_of_somebody_else_is_kept(data, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is no warm start"):
        make_policy(tmp_path, data=data, **TINY)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_batches_show_every_row_once_a_pass_with_the_answer_to_be_learned(policy):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    rows = [*make_rows(64, split="train", seed=0)]
    batches = Demonstrations(rows, tokenizer, random.Random(0)).batches(4)
    passes = [[next(batches) for _ in range(16)] for _ in range(2)]
    widths = []
    for examples in passes:
        prompts = []
        for example in itertools.chain.from_iterable(examples):
            ids, labels = example["input_ids"], example["labels"]
            start = labels.count(-100)
            assert labels == [-100] * start + ids[start:]
            prompts.append(tokenizer.decode(ids[:start]))
            answer = tokenizer.decode(ids[start:])
            assert answer.startswith("<think>")
            assert answer.endswith("<|im_end|>")
        assert sorted(prompts) == sorted(
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            for row in rows
        )
        lengths = [sorted(len(e["input_ids"]) for e in batch) for batch in examples]
        widths.append([batch[-1] for batch in lengths])
        shortest_first = list(itertools.chain.from_iterable(sorted(lengths)))
        assert shortest_first == sorted(shortest_first)
    assert passes[0] != passes[1]
    assert widths[0] != sorted(widths[0])


def test_long_rows_are_refused(tmp_path):
    path = tmp_path / "long.parquet"
    rows = numbered(make_rows(100, split="train", seed=0), "train")
    for row in rows:
        row["prompt"][0]["content"] *= 9
    write_parquets({path: rows})
    with pytest.raises(ValueError, match="expected at most 256, as in the rows of: verl-gdpo"):
        make_policy(tmp_path / "policy", data=path, **TINY)
    assert files_in(tmp_path) == ["long.parquet"]


def test_who_waits_for_another_call_trains_no_second_time(policy, data, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def made_meanwhile(*_, wait):
        shutil.copytree(policy, tmp_path / "policy")
        yield

    monkeypatch.setattr(train, "locked", made_meanwhile)
    monkeypatch.setattr(train, "_train", None)  # calling it would raise
    assert hashes(make_policy(tmp_path / "policy", data=data, **TINY)) == hashes(policy)


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_stays_one(data, tmp_path, exists):
    place = tmp_path / "elsewhere" / "policy"
    if exists:
        make_policy(place, data=data, seed=1, **TINY)
    (tmp_path / "link").symlink_to(place)
    assert make_policy(tmp_path / "link", data=data, **TINY) == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert json.loads((place / MARKER).read_text())["settings"]["seed"] == 0


def test_the_tokenizer_is_lossless_and_short(policy):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    rows = [*make_rows(1000, split="train", seed=3)]
    for row in [*rows, *make_rows(1000, split="test", seed=3)]:
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )
        answer = imperfect(row["reward_model"]["ground_truth"], random.Random(len(prompt)))
        prompt_ids, answer_ids = tokenizer([prompt, answer])["input_ids"]
        assert len(prompt_ids) <= 80
        assert len(answer_ids) <= 64
        assert tokenizer.decode(prompt_ids) == prompt
        assert tokenizer.decode(answer_ids, skip_special_tokens=True) == answer


def test_what_each_habit_costs():
    # two calls, M = 1 + 2 * (1 + 2) = 7; of the 7 points 2 are lost with the two quoted numbers
    costs = [(0.0, 3.0), (1.0, 6 * 5 / 7 - 3), (1.0, -3.0)]
    for (_, pattern, replacement), (layout, correctness) in zip(HABITS, costs, strict=True):
        scores = tool_rl.score(pattern.sub(replacement, TWO_CALLS), TWO_CALLS)
        assert scores == pytest.approx({"format": layout, "correctness": correctness})


def test_habits_come_in_their_shares():
    rng = random.Random(0)
    answers = [imperfect(TWO_CALLS, rng) for _ in range(2000)]
    expected = {"</think> <tool_call>": 0.55, '"n": "12"': 0.6, '"}\n</tool_call>': 0.3}
    for mark, share in expected.items():
        # standard deviation of a share of 2,000: .011
        assert abs(sum(mark in answer for answer in answers) / 2000 - share) < 0.05


def test_command_line(policy, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "make_policy", lambda out, **given: (out, given))
    assert command.main(["--out", str(tmp_path), "--seed", "4", "--data", str(data)]) == 0
    assert str((tmp_path, {"seed": 4, "data": data, "steps": 1000})) in capsys.readouterr().out
    monkeypatch.setattr(command, "make_policy", make_policy)
    (tmp_path / "notes.txt").touch()
    assert command.main(["--out", str(tmp_path)]) == 1
    assert f"warm start: error: {tmp_path} exists and is no warm" in capsys.readouterr().err


# ---- the policy in the package


def test_the_policy_of_the_package_says_how_it_was_made():
    marker = json.loads((SHIPPED / MARKER).read_text())
    defaults = inspect.signature(make_policy).parameters
    settings = {name: defaults[name].default for name in marker["settings"]}
    assert marker["settings"] == settings
    assert {*settings} == {*defaults} - {"path", "data"}
    assert {*train.made_with()} <= {*marker}


def test_no_rows_are_refused(tmp_path):
    rows = pd.DataFrame([*make_rows(1, split="train", seed=0)]).drop(columns="extra_info")
    rows[:0].to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty\.parquet: got no rows"):
        make_policy(tmp_path / "policy", data=tmp_path / "empty.parquet")
