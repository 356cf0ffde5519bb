"""`rubric` in the list of functions: from a function's criteria to advantages and the dump."""

import json
import re
from types import SimpleNamespace

import oracle
import pytest
from repository import REPO
from reward_rows import Tokenizer, scored
from stand_in import stand_in
from v1_step import dump, ours, step_of
from verl_batch import verl_config

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RUBRIC_KEY, RewardError
from verl_gdpo.hooks import legacy
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.hooks.extend import attach
from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.hooks.trainer import update_validation_metrics
from verl_gdpo.scoring.reward_functions import reward_functions
from verl_gdpo.tools.run_folder.dump_reader import read_dump

FILE = """
import json

def judge(solution_str, extra_info):
    return json.loads(solution_str)

def right(solution_str):
    return float("1" in solution_str)
"""
KEY = f"{RUBRIC_KEY}judge"
WEIGHTS = {"u": {"clear": 3, "short": 1}, "v": {"cites": 2, "is kind / polite": -1, "kind": 1}}
ANSWERS = {
    "u": [{"clear": 0, "short": 2}, {"clear": 1, "short": 0}, {"clear": 1, "short": None}],
    "v": [
        {"cites": 0, "kind": 5, "is kind / polite": 0},
        {"cites": 1, "kind": 2, "is kind / polite": 0},
        {"cites": 1, "kind": 5, "is kind / polite": 3},
    ],
}


pytestmark = pytest.mark.usefixtures("event_loop")


@pytest.fixture
def entries(tmp_path):
    (tmp_path / "my_rewards.py").write_text(FILE)
    path, functions = tmp_path / "my_rewards.py", "+reward.reward_functions"
    return [
        f"{functions}.right={{path: {path}, name: right, weight: 2.0}}",
        f"{functions}.judge={{path: {path}, name: judge, rubric: criteria, weight: 0.5}}",
        "++algorithm.gdpo.max_failed=1",
    ]


def score(config, answer, weights):
    manager = GdpoRewardManager(config, Tokenizer(), None)
    extra_info = {"criteria": weights} if weights else {}
    fields = {"global_steps": 7, "extra_info": extra_info}
    return scored(manager, json.dumps(answer), **fields)["reward_extra_info"]


def trained(queue, folder, overrides, weights=WEIGHTS):
    """A step of verl's V1 trainer on what its reward manager makes of `ANSWERS`, and its dump."""
    trainer = ours(folder, *overrides)
    for uid, answers in ANSWERS.items():
        infos = [score(trainer.config, answer, weights[uid]) for answer in answers]
        queue.add_group(uid, infos, range(2, 2 + len(infos)))
    batch, metrics = step_of(trainer)
    return dump(trainer, batch), metrics


def expected(is_divided=True, gate=None, **options):
    """The oracle's advantages by uid; `gate`: what a wrong sample gets of the rubric."""
    rewards, groups, present, weights, uids = [], [], [], [], []
    for uid, answers in ANSWERS.items():
        names = ["none", *WEIGHTS[uid]][-3:]
        divisor = sum(map(abs, WEIGHTS[uid].values())) if is_divided else 1
        for n, answer in enumerate(answers):
            values = [answer.get(name) for name in names]
            right = "1" in json.dumps(answer)
            if gate and not right:
                values = [None if gate == "missing" or v is None else 0.0 for v in values]
            rewards.append([float(right), *(value or 0 for value in values)])
            present.append([True, *(value is not None for value in values)])
            weights.append([2.0, *(0.5 * WEIGHTS[uid].get(k, 0) / divisor for k in names)])
            groups.append(uid)
            uids.append(f"{uid}_{n}_0")
    lengths = [2, 3, 4] * 2
    of_rows = {"present": present, "weights": weights, "lengths": lengths}
    A_B = oracle.gdpo(rewards, groups, **of_rows, **options)
    return dict(zip(uids, A_B, strict=True))


WHEN = "weight: 0.5, when: {reward: right, at_least: 1}"
GRPO = {"group_norm": "summed", "batch_norm": "none", "eps": 1e-6}


def gated(otherwise):
    """Overrides of conditions, which hold for all criteria; they move the weights too."""
    return f"++algorithm.gdpo.rewards={{right: 2.0, judge: {{{WHEN}, otherwise: {otherwise}}}}}"


@pytest.mark.parametrize(
    ("override", "options"),
    [
        ("++algorithm.gdpo.eps=1e-4", {}),
        ("++algorithm.gdpo.rubric_weights=as_written", {"is_divided": False}),
        ("++algorithm.gdpo.batch_norm=token", {"batch_norm": "token"}),
        ("++algorithm.gdpo.group_norm=summed", {"group_norm": "summed"}),
        ("algorithm.norm_adv_by_std_in_grpo=False", {"normalize_by_std": False}),
        ("algorithm.adv_estimator=grpo", GRPO),
        (gated("zero"), {"gate": "zero"}),
        (gated("missing"), {"gate": "missing"}),
    ],
)
def test_a_step_and_its_dump(queue, tmp_path, entries, override, options):
    if "gate" in options:
        entries = [
            each.replace(", weight: 2.0", "").replace(", weight: 0.5", "") for each in entries
        ]
    path, metrics = trained(queue, tmp_path, [*entries, override])
    rows = read_dump(path)
    assert {row["uid"]: row["advantage"] for row in rows} == pytest.approx(
        expected(**options), abs=1e-5
    )
    assert rows[2]["rewards"][KEY] == {"clear": [1.0, 3.0], "short": [None, 1.0]}
    assert [name for name in metrics if "clear" in name or "kind" in name] == []
    if "gate" not in options:
        assert metrics["gdpo/judge/criteria"] == (2 + 2 + 1 + 3 * 3) / 6
    assert metrics["gdpo/judge/share"] + metrics["gdpo/right/share"] == pytest.approx(1)


@pytest.mark.parametrize("criteria", [2, 6, 7, 22])
def test_a_condition_on_all_criteria(entries, criteria):
    """Six shares of 1/6 add up to less than 1."""
    entries = [each.replace(", weight: 2.0", "").replace(", weight: 0.5", "") for each in entries]
    entries[1] = entries[1].replace("rubric: criteria", "rubric: true")
    when = "{weight: 1, when: {reward: judge, at_least: 1.0}}"
    config = verl_config(*entries, f"++algorithm.gdpo.rewards={{right: {when}, judge: 0}}")
    answer = {f"criterion {n}": 1 for n in range(criteria)}
    assert score(config, answer, None)["score"] == 1.0
    assert score(config, {**answer, "criterion 0": 0.99}, None)["score"] == 0.0


def test_without_a_column_all_criteria_weigh_the_same(queue, tmp_path, entries, monkeypatch):
    entries[1] = entries[1].replace("rubric: criteria", "rubric: true")
    monkeypatch.setitem(WEIGHTS, "u", {"clear": 1, "short": 1})
    monkeypatch.setitem(WEIGHTS, "v", dict.fromkeys(WEIGHTS["v"], 1))
    path, _ = trained(queue, tmp_path, entries, {"u": None, "v": None})
    by_uid = {row["uid"]: row["advantage"] for row in read_dump(path)}
    assert by_uid == pytest.approx(expected(), abs=1e-5)


def test_criteria_that_differ_within_a_prompt_end_the_run(queue, tmp_path, entries, monkeypatch):
    entries[1] = entries[1].replace("rubric: criteria", "rubric: true")
    monkeypatch.setitem(ANSWERS, "u", [{"clear": 0}, {"clear": 1, "short": 2}])
    message = r"u_1_0: rubric 'judge' has the weights {'clear': 1.0, 'short': 1.0}, expected"
    with pytest.raises(RewardError, match=message):
        trained(queue, tmp_path, entries, {"u": None, "v": None})


def test_what_the_manager_returns(entries):
    config = verl_config(*entries)
    score_of = {"right": 0.0, "judge": 3 * 0.5 / 4 + 0.25 * 3, "score": 0.5 * 1.125}
    info = score(config, {"clear": 0.5, "short": 3}, WEIGHTS["u"])
    assert info == {**score_of, KEY: {"clear": [0.5, 3.0], "short": [3.0, 1.0]}}
    none = score(config, {"clear": None, "short": None}, WEIGHTS["u"])
    assert none["judge"] is None and none["score"] == 0
    assert none[KEY] == {"clear": [None, 3.0], "short": [None, 1.0]}
    config.transfer_queue.enable = True
    for answer, weights in ((None, WEIGHTS["u"]), ({"clear": 1.0}, None), (1.0, WEIGHTS["u"])):
        assert "expected {criterion: number}" in score(config, answer, weights)["gdpo_error"]


def test_the_example_of_the_page(tmp_path):
    page = (REPO / "docs" / "rewards.md").read_text()
    (block,) = re.findall(r"```python\n(import json\n.*?)```", page, re.DOTALL)
    (line,) = re.findall(r"^'(.*rubric: criteria})'$", page, re.MULTILINE)
    path = tmp_path / "my_rewards.py"
    path.write_text(f"{block}\n\ndef ask(text, answer):\n    return json.loads(answer)[text]\n")
    config = verl_config(line.replace("my_rewards.py", str(path)))
    info = score(config, {"clear": 0.5, "short": 3}, json.dumps(WEIGHTS["u"]))
    assert info["quality"] == 3 * 0.5 / 4 + 0.25 * 3


def test_validation_has_one_series():
    infos = {"judge": [0.5, 1.0], KEY: [{"clear": [0.5, 1.0]}, {"kind": [1.0, 1.0]}]}

    def verls(self, data_sources, sample_uids, reward_extra_infos_dict):
        return reward_extra_infos_dict

    trainer = SimpleNamespace()
    attach(trainer, SimpleNamespace(settings=GdpoSettings()))
    infos = stand_in(update_validation_metrics, verls)(trainer, "ss", "uu", infos)
    assert infos == {"judge": [0.5, 1.0]}


def test_a_rubric_takes_no_number_as_otherwise(entries):
    """Each criterion would get it, and the score of verl would have it once."""
    entries = [each.replace(", weight: 2.0", "").replace(", weight: 0.5", "") for each in entries]
    message = r"gdpo.rewards.judge.otherwise=-1.0: the reward is a rubric.*Set otherwise=zero or mi"
    with pytest.raises(ValueError, match=message):
        settings_of_run(verl_config(*entries, gated("-1.0")))
    settings_of_run(verl_config(*entries, gated("zero")))


def test_where_no_rubric_can_be(entries):
    with pytest.raises(ValueError, match=r"judge.rubric=criteria with algorithm.gdpo.combine=rvpo"):
        settings_of_run(verl_config(*entries, "++algorithm.gdpo.combine={name: rvpo, k: 1.0}"))
    with pytest.raises(ValueError, match=r"judge.rubric=criteria: only the V1 trainers"):
        trainer = SimpleNamespace(config=verl_config(*entries))
        stand_in(legacy.create_dataloader, lambda self: None)(trainer)
    by_key = verl_config(*entries, "reward.reward_functions.judge.weight={clear: 1}")
    with pytest.raises(
        ValueError, match=r"rubric=criteria: got weight={'clear': 1}; expected a number"
    ):
        reward_functions(by_key)
