"""examples/own_loop.py, and the lines of docs/without_verl.md on a loop of one's own."""

import contextlib
import io
import re

import pytest
import torch
from pages import PAGES
from repository import REPO

from examples import own_loop
from verl_gdpo import compute_gdpo_advantage


def test_the_lines_of_the_page():
    (block,) = re.findall(
        r"<!-- executed by tests/repository/test_own_loop.py -->\n```python\n(.*?)```",
        PAGES["docs/without_verl.md"],
        re.S,
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block, {})
    # z is -.7071, .7071 for the format of both groups; the judge of b has one value, so no spread.
    weighted = [[-1 + 0.5, 1 - 0.5], [-1, 1]]
    S = [0.70711 * value for group in weighted for value in group]
    std = torch.tensor(S).std()
    expected = [value / std.item() for value in S]
    numbers = re.findall(r"-?\d\.\d{4}", printed.getvalue())
    assert [float(number) for number in numbers] == pytest.approx(expected, abs=1e-3)


def test_the_loop_trains_and_prints_its_table(capsys):
    own_loop.main(3)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "GRPO", "format", "judge", "GDPO", "format", "judge"]
    assert [row.split()[0] for row in rows] == ["1", "3"]
    # Both begin with the same policy, and what is drawn is the same until the first update.
    first = rows[0].split()
    assert first[1:3] == first[3:5]


def test_grpo_hardly_hears_of_the_format_and_gdpo_does():
    """In the first step, from the advantages: how much of them the format explains."""
    torch.manual_seed(0)
    policy = own_loop.Policy()
    prompts = torch.randint(1, own_loop.WORDS, (64,)).repeat_interleave(own_loop.SAMPLES)
    texts = policy.respond(prompts).tolist()
    rewards = [own_loop.score(prompt, response) for prompt, *response in texts]
    groups = torch.arange(64).repeat_interleave(own_loop.SAMPLES)
    formats = torch.tensor([reward["format"] for reward in rewards])
    mask = torch.ones(len(rewards), 1)
    correlations = {}
    for estimator, options in own_loop.ESTIMATORS.items():
        advantages = compute_gdpo_advantage(rewards, groups, mask, **options)[:, 0]
        correlations[estimator] = torch.corrcoef(torch.stack([formats, advantages]))[0, 1].item()
    assert correlations["GDPO"] > 0.3
    assert abs(correlations["GRPO"]) < 0.15


def test_the_loop_needs_torch_alone():
    text = (REPO / "examples" / "own_loop.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert imported == {"sys", "torch", "verl_gdpo"}
