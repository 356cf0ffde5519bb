"""examples/trl_gsm8k.py: what TRL's trainer puts into its loss. Only `nox -s trl` runs this."""

import re
import subprocess
import sys

import pytest
import torch
from repository import REPO
from transformers import AutoTokenizer

from examples import trl_gsm8k
from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.settings import DIALECTS
from verl_gdpo.tasks.gsm8k.score import score
from verl_gdpo.tools.data import main
from workshop.tiny_policy.train import make_policy

NAMES = ("correctness", "format", "integer")
STEPS = 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "gsm8k_tiny"
    assert main(["gsm8k", "--synthetic", "200", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def policy(rows):
    """Taught just enough to sometimes write the layout, and sometimes a number."""
    return make_policy(
        rows.parent / "policy", data=rows / "train.parquet", steps=120, hidden_size=64
    )


@pytest.fixture(scope="module")
def trained(rows, policy, tmp_path_factory):
    """The trainer, each batch as generated, and each batch as it entered the loss."""
    trainer = trl_gsm8k.make_trainer(rows, policy, tmp_path_factory.mktemp("out"), STEPS)
    generated, entered = [], []
    generate, loss = trainer._generate_and_score_completions, trainer._compute_loss

    def generate_and_keep(inputs):
        generated.append((inputs, generate(inputs)))
        return generated[-1][1]

    def keep_and_compute(model, inputs):
        entered.append(inputs)
        return loss(model, inputs)

    trainer._generate_and_score_completions = generate_and_keep
    trainer._compute_loss = keep_and_compute
    trainer.train()
    return trainer, generated, entered


def tokens_of(batch, i):
    """The prompt and the completion of a row."""
    return tuple(
        tuple(batch[f"{part}_ids"][i][batch[f"{part}_mask"][i].bool()].tolist())
        for part in ("prompt", "completion")
    )


def expected_rewards(tokenizer, inputs, batch):
    """The rewards of each row, from its tokens."""
    scored = [
        score(
            tokenizer.decode(tokens_of(batch, i)[1], skip_special_tokens=True),
            row["reward_model"]["ground_truth"],
        )
        for i, row in enumerate(inputs)
    ]
    return torch.tensor([[rewards[name] for name in NAMES] for rewards in scored])


def test_the_loss_has_our_advantages(trained, policy):
    _, generated, entered = trained
    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert len(generated) == len(entered) == STEPS
    for (inputs, batch), used in zip(generated, entered, strict=True):
        rewards_BK = expected_rewards(tokenizer, inputs, batch)
        assert (rewards_BK.std(dim=0) > 0).sum() >= 2
        groups = [row["extra_info"]["index"] for row in inputs]
        assert {groups.count(group) for group in groups} == {trl_gsm8k.GENERATIONS}
        advantages = compute_gdpo_advantage(
            rewards_BK, groups, torch.ones(len(groups), 1), **DIALECTS["trl"]
        )[:, 0]
        # TRL shuffles the rows on the way; equal answers to one prompt have equal advantages
        ours = {tokens_of(batch, i): advantages[i] for i in range(len(groups))}
        assert len(used["advantages"]) == len(groups)
        expected = torch.stack([ours[tokens_of(used, i)] for i in range(len(groups))])
        torch.testing.assert_close(used["advantages"], expected, rtol=0, atol=1e-5)
        assert expected.abs().max() > 0.5


def test_trl_logs_each_reward_by_its_name(trained, policy):
    trainer, generated, _ = trained
    tokenizer = AutoTokenizer.from_pretrained(policy)
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == STEPS
    for (inputs, batch), entry in zip(generated, logged, strict=True):
        means = expected_rewards(tokenizer, inputs, batch).mean(dim=0).tolist()
        assert [entry[f"rewards/{name}/mean"] for name in NAMES] == pytest.approx(means, abs=1e-6)


def test_the_documents_example(rows, policy, tmp_path, monkeypatch):
    """With its paths, and without a GPU."""
    page = (REPO / "docs" / "without_verl.md").read_text()
    (block,) = re.findall(
        r"executed by tests/slow/trl_example.py -->\n```python\n(.*?)```", page, re.S
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k_tiny").symlink_to(rows)
    (tmp_path / "data" / "gsm8k_policy").symlink_to(policy)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block, names)
    assert tuple(names["trainer"].reward_func_names) == NAMES
    assert names["trainer"].reward_weights.tolist() == [1.0, 0.5, 0.5]


def test_the_command(rows, policy, tmp_path):
    command = [sys.executable, trl_gsm8k.__file__, "--data", rows, "--policy", policy]
    command += ["--out", tmp_path / "out", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = [line.split()[0] for line in done.stdout.splitlines()[-4:]]
    assert table == ["reward", *NAMES]
    assert {"model.safetensors", "trainer_state.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
