"""`verl-gdpo replay`: the advantages of a dump under its own and under other settings."""

import json
import re
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
import yaml
from repository import REPO
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_gdpo.algorithm.values import RUBRIC_KEY
from verl_gdpo.tools.replay import choose, main
from verl_gdpo.tools.replay.arms import ARMS, Arm, read_run, rounding_of_grpo, verl_grpo
from verl_gdpo.tools.replay.comparison import LOGGED, Replay
from verl_gdpo.tools.run_folder.dump_reader import data_sources, dump_files
from verl_gdpo.tools.run_folder.folder import config_of_run

RECIPES = REPO / "recipes"


def rollout(uid, advantage=0.0, tokens=3, source="s", padding=False, output="text", **rewards):
    return {
        "input": "the prompt",
        "output": output,
        "uid": uid,
        "group": uid.rsplit("_", 2)[0],
        "session": int(uid.rsplit("_", 2)[1]),
        "data_source": source,
        "response_tokens": 2 * tokens,  # half of them are an answer of a tool
        "trained_tokens": tokens,
        "rewards": rewards,
        "advantage": float(np.float32(advantage)),
        "is_padding": padding,
    }


def write(folder, steps, algorithm=None):
    """A run's folder: {step: rows} as dumps, and Hydra's configuration."""
    (folder / "rollouts").mkdir(parents=True)
    for step, rows in steps.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"{step}.jsonl").write_text(text)
    if algorithm is not None:
        (folder / "hydra" / ".hydra").mkdir(parents=True)
        config = {"run_dir": "x", "algorithm": algorithm}
        (folder / "hydra" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def replayed(folder, algorithm, *others, **options):
    arms = [Arm(f"other{i}", other, {}) for i, other in enumerate(others)]
    return Replay(Arm("run", algorithm, {}), arms, **options).read(dump_files(folder)[0])


def advantages(replay, name, step=0):
    return replay.steps[step].columns[name].A_B.tolist()


GDPO = {"adv_estimator": "gdpo"}
GRPO = {"adv_estimator": "grpo"}


def test_each_batch_of_a_step_has_a_batch_norm_of_its_own(tmp_path):
    """As verl's asynchronous trainers compute them: two mini-batches in one dump."""
    batches = [[(0, 0), (1, 1), (0, 1)], [(0, 2), (5, 5), (1, 0)]]
    rows = []
    for batch, values in enumerate(batches):
        A = oracle.gdpo(values, ["g"] * 3)
        for i, ((x, y), a) in enumerate(zip(values, A, strict=True)):
            rows.append({**rollout(f"g{batch}_{i}_0", a, x=x, y=y), "batch": batch})
    replay = replayed(write(tmp_path / "two", {1: rows}), GDPO)
    assert replay.worst.difference < 1e-6
    for row in rows:
        del row["batch"]
    assert replayed(write(tmp_path / "one", {1: rows}), GDPO).worst.difference > 0.01


def two_groups():
    """The README's batch: rewards (0,0) (0,1) and (0,0) (1,1)."""
    made = zip(VALUES.items(), (-0.54768, 0.54768, -1.09536, 1.09536), strict=True)
    return [rollout(uid, a, x=x, y=y) for (uid, (x, y)), a in made]


def test_the_readmes_batch(tmp_path):
    # std of (0, 1) is 1/sqrt 2, so both groups are -+ .7071 in GRPO; GDPO doubles the second
    replay = replayed(write(tmp_path, {1: two_groups()}), GDPO, GRPO)
    assert replay.worst.difference < 1e-5
    half = 0.5**0.5
    np.testing.assert_allclose(advantages(replay, "other0"), [-half, half, -half, half], atol=2e-6)
    [step] = replay.steps
    logged, grpo = step.columns[LOGGED], step.columns["other0"]
    # scaled by their std (ddof 0): logged -+ .5477 / .8660 = .6325, 1.2649; grpo -+ 1
    assert logged.distance_B(grpo).mean() == pytest.approx((0.36754 + 0.26491) / 2, abs=1e-4)
    assert logged.correlation(grpo) == pytest.approx((0.63246 + 1.26491) / 2, abs=1e-4)


def test_ties_signs_and_silent_groups(tmp_path):
    # a: sums 1, 1 are tied by GRPO; with weight 2 on y they are not, and x against y changes signs
    rows = [
        *(rollout("a_0_0", x=1, y=0), rollout("a_1_0", x=0, y=1)),
        *(rollout("b_0_0", x=0, y=0), rollout("b_1_0", x=2, y=1)),
        *(rollout("c_0_0", x=5, y=5), rollout("c_1_0", x=5, y=5)),
    ]
    only_x = {**GDPO, "gdpo": {"rewards": {"x": 1.0}, "batch_norm": "none"}}
    minus_x = {**GDPO, "gdpo": {"rewards": {"x": -1.0}, "batch_norm": "none"}}
    for row, a in zip(rows, (0.7071, -0.7071, -0.7071, 0.7071, 0, 0), strict=True):
        row["advantage"] = a
    [step] = replayed(write(tmp_path, {1: rows}), only_x, GRPO, minus_x).steps
    logged, grpo, minus = step.columns.values()
    # different rewards: the pairs a and b; GRPO gives a one advantage
    assert (logged.tied_pairs, grpo.tied_pairs, minus.tied_pairs) == (0, 0.5, 0)
    assert (logged.silent_groups, grpo.silent_groups) == pytest.approx((1 / 3, 2 / 3))
    assert logged.correlation(minus) == pytest.approx(-1)


def test_rewards_of_weight_0_do_not_make_a_tie(tmp_path):
    rows = [rollout("p_0_0", x=1, y=0), rollout("p_1_0", x=1, y=1)]
    without_y = {**GDPO, "gdpo": {"rewards": {"x": 1.0, "y": 0.0}}}
    [step] = replayed(write(tmp_path, {1: rows}), GDPO, without_y).steps
    # logged 0, 0 is one advantage; without y there are no two different rewards
    assert [column.tied_pairs for column in step.columns.values()] == [1, None]


@pytest.mark.parametrize("name", sorted(ARMS))
def test_every_arm_is_the_oracles(tmp_path, name):
    rng = np.random.default_rng(3)
    groups = [f"g{i // 4}" for i in range(24)]
    lengths = rng.integers(1, 50, 24).tolist()
    rewards = rng.choice([-3.0, 0.5, 1.0, 2.25], (24, 2)).tolist()
    rows = [
        rollout(f"{group}_{i % 4}_0", tokens=length, x=x, y=y)
        for i, (group, length, (x, y)) in enumerate(zip(groups, lengths, rewards, strict=True))
    ]
    weights = {"gdpo": {"rewards": {"x": 1.0, "y": 0.5}}}
    block = ARMS[name].get("gdpo", {})
    expected = oracle.gdpo(
        rewards,
        groups,
        weights=[1.0, 0.5],
        lengths=lengths,
        group_norm="summed" if name.startswith("grpo") else "per_reward",
        normalize_by_std=name != "grpo_no_std",
        batch_norm="none" if name in ("grpo", "grpo_no_std") else block.get("batch_norm", "sample"),
        eps=1e-6 if name in ("grpo", "grpo_no_std") else 1e-4,
    )
    # whatever the run did, only its rewards pass to an arm
    run = {"adv_estimator": "gdpo", "gdpo": {**weights["gdpo"], "batch_norm": "none"}}
    replay = replayed(write(tmp_path, {1: rows}), run, Arm("run", run, {}).as_arm(name).algorithm)
    np.testing.assert_allclose(advantages(replay, "other0"), expected, atol=2e-6)


# by prompt: what each criterion of its rubric weighs, and what each answer got
CRITERIA = {
    "u": ((3.0, 1.0), [(0.0, 2.0), (1.0, 0.0), (1.0, None)]),
    "v": ((2.0, -1.0), [(0.0, 5.0), (1.0, 2.0), (1.0, 5.0)]),
}


def of_rubric(is_divided):
    """Rows of two rewards, one of them a rubric, with the oracle's advantages."""
    rows, groups, rewards, present, weights = [], [], [], [], []
    for uid, (own_weights, answers) in CRITERIA.items():
        divisor = sum(map(abs, own_weights)) if is_divided else 1.0
        for number, values in enumerate(answers):
            right = float(number == 1)
            criteria = {
                f"c{i}": [value, weight]
                for i, (value, weight) in enumerate(zip(values, own_weights, strict=True))
            }
            named = {"right": right, "judge": 1.0, f"{RUBRIC_KEY}judge": criteria}
            rows.append(rollout(f"{uid}_{number}_0", **named))
            groups.append(uid)
            rewards.append([right, *(value or 0.0 for value in values)])
            present.append([True, *(value is not None for value in values)])
            weights.append([2.0, *(0.5 * weight / divisor for weight in own_weights)])
    A_B = oracle.gdpo(rewards, groups, present=present, weights=weights)
    for row, advantage in zip(rows, A_B, strict=True):
        row["advantage"] = advantage
    return rows


@pytest.mark.parametrize("weights", ["divided", "as_written"])
def test_each_criterion_of_a_rubric_is_normalised(tmp_path, capsys, weights):
    gdpo = {"rewards": {"right": 2.0, "judge": 0.5}, "rubric_weights": weights}
    rows = of_rubric(is_divided=weights == "divided")
    folder = write(tmp_path, {1: rows}, {**GDPO, "gdpo": gdpo})
    assert main([str(folder)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "reproduce" in out
    assert "A rubric counts here as one reward" in out
    # The other division as a comparison changes nothing about the run's own.
    other = "as_written" if weights == "divided" else "divided"
    assert main([str(folder), f"++algorithm.gdpo.rubric_weights={other}"]) == 0
    # A run that says the other division did not log these advantages.
    of_other = {**GDPO, "gdpo": {**gdpo, "rubric_weights": other}}
    assert main([str(write(tmp_path / "other", {1: rows}, of_other))]) == 1


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_grpo_is_verls_to_the_last_bit(normalize_by_std):
    # groups of 1 to 6; constants that float32 cannot hold leave a residue in verl, and so here
    group_B = np.array([3, 1, 1, 2, 2, 2, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 4])
    scores_B = np.array([7.0, *[0.3] * 5, *[2000.3] * 3, 1.0, 0.1, 0.2, 0.7, -3, 0.1, 2.9, 0.4])
    verls, _ = compute_grpo_outcome_advantage(
        torch.tensor(scores_B, dtype=torch.float32)[:, None],
        torch.ones(len(scores_B), 1),
        group_B,
        norm_adv_by_std_in_grpo=normalize_by_std,
    )
    assert verl_grpo(scores_B, group_B, normalize_by_std).tolist() == verls[:, 0].tolist()


def test_grpo_in_another_order_is_a_run_of_several_ranks(tmp_path, capsys):
    # verl balances the rows of its ranks before the advantage, and adds float32 in that order
    group_B, random = np.repeat(np.arange(64), 4), np.random.default_rng(0)
    scores_B = 3 + 0.03 * random.standard_normal(256)
    order = random.permutation(256)
    scores = torch.tensor(scores_B[order], dtype=torch.float32)[:, None]
    verls, _ = compute_grpo_outcome_advantage(scores, torch.ones(256, 1), group_B[order])
    A_B = np.zeros(256)
    A_B[order] = verls[:, 0].numpy()
    difference_B = np.abs(A_B - verl_grpo(scores_B, group_B, True))
    bound_B = rounding_of_grpo(scores_B, group_B, True)
    assert difference_B.max() > 1e-5 and 0.1 < (difference_B / bound_B).max() <= 1
    logged = zip(group_B.tolist(), A_B.tolist(), scores_B.tolist(), strict=True)
    rows = [rollout(f"q{g}_{i}_0", A, x=score) for i, (g, A, score) in enumerate(logged)]
    assert main([str(write(tmp_path / "same", {1: rows}, GRPO))]) == 0
    rows[7]["advantage"] += 4 * float(bound_B[7])
    assert main([str(write(tmp_path / "other", {1: rows}, GRPO))]) == 1
    assert "q1_7_0. Is it the run's" in capsys.readouterr().out


def test_schedules_and_conditions_hold_at_each_step(tmp_path):
    # y counts where x is 1, and less from step to step
    rewards = {"x": 1.0, "y": {"weight": {1: 1.0, 3: 0.0}, "when": {"reward": "x", "at_least": 1}}}
    raw, gated = [(1, 4), (0, 9), (1, 2), (0, 0)], [(1, 4), (0, 0), (1, 2), (0, 0)]
    steps = {}
    for step, weight in ((1, 1.0), (2, 0.5), (3, 0.0)):
        expected = oracle.gdpo(gated, ["p"] * 4, weights=[1.0, weight])
        steps[step] = [
            rollout(f"p_{i}_0", a, x=x, y=y)
            for i, ((x, y), a) in enumerate(zip(raw, expected, strict=True))
        ]
    algorithm = {**GDPO, "gdpo": {"rewards": rewards}}
    replay = replayed(write(tmp_path, steps), algorithm)
    assert [step.number for step in replay.steps] == [1, 2, 3]
    assert replay.worst.difference < 1e-6 and replay.row_count == 12
    unscheduled = replayed(tmp_path, {**GDPO, "gdpo": {"rewards": {**rewards, "y": 1.0}}})
    assert unscheduled.worst.difference > 0.1


def test_a_run_that_paid_for_failing_is_reproduced_and_a_change_to_it_is_refused(tmp_path, capsys):
    """An earlier version took the default where the values of a gated reward are negative."""
    when = {"reward": "x", "at_least": 1}
    raw, gated = [(1, 0), (1, -4), (0, -1)], [(1, 0), (1, -4), (0, 0)]
    expected = oracle.gdpo(gated, ["p"] * 3)
    rows = [
        rollout(f"p_{i}_0", a, x=x, y=y)
        for i, ((x, y), a) in enumerate(zip(raw, expected, strict=True))
    ]
    algorithm = {**GDPO, "gdpo": {"rewards": {"x": 1.0, "y": {"when": when}}}}
    folder = str(write(tmp_path, {1: rows}, algorithm))
    assert main([folder]) == 0
    assert main([folder, "++algorithm.gdpo.eps=0.1"]) == 0  # says nothing of the condition
    assert main([folder, "++algorithm.gdpo.rewards={y: {otherwise: missing}}"]) == 0
    capsys.readouterr()
    assert main([folder, "++algorithm.gdpo.rewards.y.weight=2"]) == 1
    told = capsys.readouterr().err
    assert "rewards.y: a sample without 'x' of at least 1 gets 0 (the default)" in told
    assert "which is better than -4, which p_1_0 has" in told


def test_bounds_that_the_runs_scorer_declares(tmp_path):
    # format is in [0, 1]: half reached, so sqrt .5; correctness in [-3, 3]: also half
    values = {"p_0_0": (0, -3), "p_1_0": (0, 3), "p_2_0": (1, 3), "p_3_0": (1, -3)}
    gdpo = {"combine": "sa_mrpo", "batch_norm": "none", "eps": 0.0}
    folder = of_tool_rl(tmp_path, gdpo, values)
    own = read_run(config_of_run(folder), ["rlla"])
    replay = Replay(own, [replace(own, name="other")]).read(dump_files(folder)[0])
    # each z is -+ .8660 (two of four), and S their sum times sqrt .5
    S = 2 * 0.75**0.5 * 0.5**0.5
    assert advantages(replay, "other") == pytest.approx([-S, 0, S, 0])
    with pytest.raises(ValueError, match="combine=sa_mrpo needs the bounds of reward"):
        replayed(folder, {**GDPO, "gdpo": gdpo})


def test_missing_rewards_and_sources(tmp_path):
    # source t has no y; a None takes part in no statistic
    values = [(1, None), (0, 2), (3, 4), (2, None), (0, None), (5, None)]
    present = [[True, y is not None] for _, y in values]
    groups = ["p"] * 4 + ["q"] * 2
    expected = oracle.gdpo([(x, y or 0) for x, y in values], groups, present=present)
    rows = []
    for i, ((x, y), group, a) in enumerate(zip(values, groups, expected, strict=True)):
        rewards = {"x": x} if group == "q" else {"x": x, "y": y}
        rows.append(rollout(f"{group}_{i}_0", a, source=group, **rewards))
    assert replayed(write(tmp_path, {4: rows}), GDPO).worst.difference < 1e-6


def test_padding_and_sessions_of_several_rows(tmp_path):
    # session p_1 has two rows, of which the last counts; the others follow it; padding is 0
    expected = oracle.gdpo([[1.0], [0.0], [4.0]], ["p"] * 3)
    rows = [
        rollout("p_0_0", expected[0], x=1.0),
        rollout("p_1_1", expected[1], x=0.0),
        rollout("p_1_0", expected[1], x=77.0),
        rollout("p_2_0", 0.0, tokens=0, x=4.0),  # counted, but no token of it is trained
        rollout("pad1_0_0", 0.0, padding=True, x=1.0),
    ]
    folder = write(tmp_path, {1: rows})
    for algorithm in (GDPO, GRPO):
        replay = replayed(folder, GDPO, algorithm)
        assert replay.worst.difference < 1e-6 and replay.row_count == 5
        assert len(advantages(replay, "other0")) == 3
        assert advantages(replay, "other0")[2] == 0


def test_silent_groups_bring_no_group_further_apart(tmp_path):
    """In units of a std that counts them, the same groups would differ twice as much there."""
    silent = [rollout(f"s{g}_{i}_0", x=1, y=1) for g in range(6) for i in range(2)]
    rows = [*two_groups(), *silent]
    rewards = [[*row["rewards"].values()] for row in rows]
    for row, a in zip(rows, oracle.gdpo(rewards, [row["group"] for row in rows]), strict=True):
        row["advantage"] = a
    replay = replayed(write(tmp_path, {1: two_groups(), 2: rows}), GDPO, GRPO)
    few, many = (
        step.columns[LOGGED].distance_B(step.columns["other0"])[:4] for step in replay.steps
    )
    assert few == pytest.approx([0.3675, 0.3675, 0.2649, 0.2649], abs=1e-3)
    assert many == pytest.approx(few, abs=1e-3)


def test_a_later_step_may_differ_more(tmp_path):
    # distances of p and q are .37 and .26; then b, where GDPO gives 0, 1; and a, 1.41 - 1
    rows = [rollout(f"b_{i}_0", 0, x=x, y=y) for i, (x, y) in enumerate([(1, 0), (0, 5)])]
    rows += [rollout(f"a_{i}_0", 1.2247 * (2 * i - 1), x=i, y=i) for i in range(2)]
    replay = replayed(write(tmp_path, {1: two_groups(), 2: rows}), GDPO, GRPO, top=2)
    kept = replay.most_different["other0"]
    assert [group.id for group in kept] == ["b", "a"]
    assert [group.distance["other0"] for group in kept] == pytest.approx([1, 2**0.5 - 1], abs=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "expected"),
    [
        (GDPO, ["++algorithm.gdpo.batch_norm=token"], {"gdpo": {"batch_norm": "token"}}),
        ({**GDPO, "gdpo": {"rewards": {"x": 1.0}}}, ["~algorithm.gdpo.rewards"], {"gdpo": {}}),
        (GDPO, ["algorithm.adv_estimator=grpo"], {"adv_estimator": "grpo"}),
        (GDPO, ["algorithm.gdpo.batch_norm=token"], "use ++algorithm.gdpo.batch_norm=token"),
    ],
)
def test_overrides_mean_what_they_mean_in_training(algorithm, overrides, expected):
    own = Arm("run", algorithm, {})
    if isinstance(expected, str):  # Hydra refuses it in training too
        with pytest.raises(ValueError, match=re.escape(expected)):
            own.changed("changed", overrides)
    else:
        assert own.changed("changed", overrides).algorithm == {**GDPO, **expected}


VALUES = {"p_0_0": (0, 0), "p_1_0": (0, 1), "q_0_0": (0, 0), "q_1_0": (1, 1)}


def of_tool_rl(folder, gdpo, values=VALUES, **algorithm):
    """A run of a task of ours with the configuration `gdpo`, and these rewards in its dump."""
    rows = [rollout(u, source="rlla", format=f, correctness=c) for u, (f, c) in values.items()]
    algorithm = {**GDPO, "gdpo": gdpo, **algorithm}
    path = write(folder, {1: rows}, algorithm) / "hydra" / ".hydra" / "config.yaml"
    model = {"enable": False, "enable_resource_pool": False}
    reward = {
        "reward_manager": {"source": "register", "name": "gdpo"},
        "reward_model": model,
        "custom_reward_function": {"path": None},
    }
    path.write_text(yaml.safe_dump({"algorithm": algorithm, "reward": reward}))
    return folder


def test_several_mistakes_have_a_line_each(tmp_path, capsys):
    write(tmp_path, {1: two_groups()}, GDPO)
    wrong = ["++algorithm.gdpo.eps=small", "++algorithm.gdpo.batch_norm=tokens"]
    assert main([str(tmp_path), *wrong]) == 1
    first, *mistakes = capsys.readouterr().err.splitlines()
    assert first == "verl-gdpo replay: the configuration has 2 mistakes:"
    keys = [mistake.partition(":")[0] for mistake in mistakes]
    assert sorted(keys) == ["  algorithm.gdpo.batch_norm", "  algorithm.gdpo.eps"]


@pytest.mark.parametrize(
    ("override", "rewards"),
    [
        ("algorithm.gdpo.rewards.format=0.5", "{format: 0.5, correctness: 1.0}"),
        ("++algorithm.gdpo.rewards.format=0.5", "{format: 0.5, correctness: 1.0}"),
        ("algorithm.gdpo.rewards.format.weight=2", "{format: {weight: 2}, correctness: 1.0}"),
    ],
)
def test_the_weight_of_one_reward_leaves_the_others_as_they_are(
    tmp_path, capsys, override, rewards
):
    folder = str(of_tool_rl(tmp_path, {"rewards": None}))
    main([folder, override])
    line = f"++algorithm.gdpo.rewards={rewards}"
    printed = capsys.readouterr().out
    assert line in printed
    # The whole line gives the same page.
    main([folder, line])
    assert capsys.readouterr().out == printed
    assert main([folder, "algorithm.gdpo.rewards.formt=0.5"]) == 1
    assert "Could not override 'algorithm.gdpo.rewards.formt'" in capsys.readouterr().err


def test_a_partial_mapping_is_refused_as_in_training(tmp_path, capsys):
    folder = str(of_tool_rl(tmp_path, {"rewards": None}))
    assert main([folder, "++algorithm.gdpo.rewards={format: 0.5}"]) == 1
    said = capsys.readouterr().err
    assert "names ['format'], and says nothing of ['correctness']" in said
    (line,) = re.findall(r"'(\+\+algorithm.*?)'", said)
    assert line == "++algorithm.gdpo.rewards={format: 0.5, correctness: 1.0}"
    assert main([folder, line, "--arm", "gdpo"]) == 1  # the logged advantages are 0
    assert f"'{line}'" in capsys.readouterr().out  # what is printed is an override


def test_rewards_have_the_names_that_they_have_in_training(tmp_path, capsys):
    """verl's names for them, and None where only other data sources have one."""
    folder = of_tool_rl(tmp_path, {"rewards": None})
    said = "++algorithm.gdpo.rewards={accuracy_reward: 2, format_reward: 1}"
    ours = "++algorithm.gdpo.rewards={correctness: 2, format: 1}"
    tables = [changed_advantages(folder, override) for override in (said, ours)]
    assert tables[0] == tables[1] and any(tables[0])
    # rows of another task, which have no `correctness` in the dump of a run that names no rewards
    dump = folder / "rollouts" / "1.jsonl"
    others = [rollout(f"{g}_{i}_0", source="openai/gsm8k", acc=i) for g in "xy" for i in (0, 1)]
    dump.write_text(dump.read_text() + "".join(json.dumps(row) + "\n" for row in others))
    every = "++algorithm.gdpo.rewards={format: 1, correctness: 1, acc: 1}"
    assert min(map(abs, changed_advantages(folder, every)[-4:])) > 0.1
    # a function of the user's own: its names are as they are
    assert main([str(folder), said, "--config", str(custom_config(tmp_path))]) == 1
    assert "reward 'accuracy_reward' is configured, but" in capsys.readouterr().err


def changed_advantages(folder, override):
    files, _ = dump_files(folder)
    own = read_run(config_of_run(folder), data_sources(files))
    [step] = Replay(own, choose(own, [], [override])).read(files).steps
    return step.columns["changed"].A_B.tolist()


def custom_config(folder):
    config = yaml.safe_load((folder / "hydra" / ".hydra" / "config.yaml").read_text())
    config["reward"]["custom_reward_function"]["path"] = "mine.py"
    (folder / "custom.yaml").write_text(yaml.safe_dump(config))
    return folder / "custom.yaml"


def test_an_old_run_with_a_partial_mapping_is_read_as_it_was_trained(tmp_path, capsys):
    folder = str(of_tool_rl(tmp_path, {"rewards": {"format": 1.0}}))
    for arguments in ([], ["--arm", "gdpo_token"], ["++algorithm.gdpo.batch_norm=none"]):
        assert main([folder, *arguments]) == 1
        assert "++algorithm.gdpo.rewards={format: 1.0}" in capsys.readouterr().out
    assert main([folder, "++algorithm.gdpo.rewards.format=0.5"]) == 1
    assert "says nothing of ['correctness']" in capsys.readouterr().err


def test_replay_refuses_what_training_refuses(tmp_path, capsys):
    folder = of_tool_rl(tmp_path, {"rewards": None}, filter_groups={"enable": True})
    falls = "++algorithm.gdpo.rewards={format: {weight: {0: 1, 9: 0}}, correctness: 0}"
    assert main([str(folder), falls]) == 1
    assert "all weights are 0 at step 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "grop"], "unknown; did you mean 'grpo'"),
        (["++algorithm.gdpo.batchnorm=none"], "did you mean 'algorithm.gdpo.batch_norm'"),
        (["++algorithm.gamma=0.5"], "algorithm.gamma=0.5: gdpo does not read it"),
        (["++algorithm.gdpo.rewards.z=1"], "1.jsonl: p_0_0: reward 'z' is configured, but"),
        (["algorithm.adv_estimator=rloo"], "adv_estimator=rloo: replay only computes gdpo"),
        (["algorithm.adv_estimator=GRPO"], "gdpo and grpo"),
        (["--arm", "grpo", "++algorithm.gdpo.batch_norm=none"], "verl's grpo does not read it"),
        (["--steps", "7:"], "--steps: no dump of these in"),
        (["--steps", "2:1"], "--steps: no dump of these in"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_line(tmp_path, capsys, arguments, message):
    write(tmp_path, {1: two_groups()}, GDPO)
    assert main([str(tmp_path), *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("verl-gdpo replay: ") and printed.err.count("\n") == 1
    assert re.search(message, printed.err), printed.err


def test_a_dump_that_cannot_be_read_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "1.jsonl").mkdir()
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert printed == f"verl-gdpo replay: [Errno 21] Is a directory: '{tmp_path}/1.jsonl'\n"


@pytest.mark.parametrize("advantage", [float("nan"), float("inf"), None])
def test_a_logged_advantage_that_is_no_number(tmp_path, capsys, advantage):
    rows = two_groups()
    rows[1]["advantage"] = advantage
    write(tmp_path, {1: rows}, GDPO)
    assert main([str(tmp_path)]) == 1
    assert "1.jsonl: p_1_0: the advantage is" in capsys.readouterr().err


def test_steps_that_are_no_numbers(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--steps", "first"])
    assert "argument --steps" in capsys.readouterr().err


def test_a_step_that_verl_is_writing_is_left_out(tmp_path, capsys):
    folder = write(tmp_path, {1: two_groups(), 2: two_groups()}, GDPO)
    last = folder / "rollouts" / "2.jsonl"
    last.write_text(last.read_text()[:-5])
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 step, 4 samples")
    assert f"Step 2 is left out, because {last} has no end: verl is still writing it" in out
    assert main([str(folder), "--steps", "1"]) == 0
    assert "left out" not in capsys.readouterr().out
    (folder / "rollouts" / "3.jsonl").write_text((folder / "rollouts" / "1.jsonl").read_text())
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 steps, 8 samples")
    assert "Step 2 is left out" in out


def test_the_printed_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    write(tmp_path, {1: two_groups(), 2: two_groups()}, GDPO)
    assert main([str(tmp_path), "--arm", "grpo", "--arm", "gdpo_no_batch_norm"]) == 0
    out = capsys.readouterr().out
    assert f"2 steps, 8 samples; the run's settings are in {tmp_path}/hydra" in out
    assert "The run's settings reproduce the logged advantages: largest |difference| " in out
    assert "== grpo ==" in out and "== gdpo_no_batch_norm ==" in out
    total = next(line for line in out.splitlines() if line.startswith("all"))
    # std of the logged: sqrt((.5477^2 + 1.0954^2) / 2) = .866
    expected = "all 8 0.949 0.316 0.0% | 0.0% 0.0% | 0.0% 0.87 | 0.71"
    assert total.split() == expected.split()
    assert max(map(len, out.split("Where")[1].split("==")[0].splitlines())) <= 100


def test_advantages_that_are_not_the_settings_are_a_warning_and_exit_1(tmp_path, capsys):
    rows = two_groups()
    rows[3]["advantage"] = 2.0
    write(tmp_path, {1: two_groups(), 2: rows}, GDPO)
    assert main([str(tmp_path / "rollouts")]) == 1
    out = capsys.readouterr().out
    # 2 - 1.0954 = .9046
    assert "WARNING" in out and "largest |difference| 0.9 " in out and "at step 2, q_1_0" in out
    assert main([str(tmp_path), "--steps", "1"]) == 0
    assert main([str(tmp_path), "--steps", "1:2"]) == 1


@pytest.mark.parametrize(
    ("algorithm", "advantage", "texts"),
    [
        (None, 9.0, ["defaults", "Is it the run's configuration (--config)"]),
        (GRPO, 9.0, ["run: ++algorithm.adv_estimator=grpo", "was it resumed with another"]),
        # another estimator's advantages are taken as they are
        (
            {"adv_estimator": "rloo"},
            None,
            ["are not recomputed (adv_estimator=rloo)", "== gdpo ==", "== grpo =="],
        ),
    ],
)
def test_whether_and_why_advantages_are_not_reproduced(
    tmp_path, capsys, algorithm, advantage, texts
):
    rows = two_groups()
    for row in rows if advantage else ():
        row["advantage"] = advantage
    folder = write(tmp_path, {1: rows, 2: rows}, algorithm)
    last = folder / "rollouts" / "2.jsonl"
    last.write_text(last.read_text()[:-5])  # a step without an end is no configuration
    assert main([str(folder / "rollouts")]) == bool(advantage)
    out = capsys.readouterr().out
    assert all(text in out for text in texts)


def test_a_configuration_elsewhere(tmp_path, capsys):
    write(tmp_path / "run", {1: two_groups()})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"algorithm": GRPO}))
    assert main([str(tmp_path / "run"), "--config", str(tmp_path / "config.yaml")]) == 1
    assert "run: ++algorithm.adv_estimator=grpo" in capsys.readouterr().out
    for text, message in (
        ("- 1", "no `algorithm` block; expected .hydra"),
        ("algorithm: 1", "no `algorithm` block"),
        ("a: [", "config.yaml: "),
    ):
        (tmp_path / "config.yaml").write_text(text)
        assert main([str(tmp_path / "run"), "--config", str(tmp_path / "config.yaml")]) == 1
        assert message in capsys.readouterr().err


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\u202eevil\u200b\x9b1m\ud800 <tag>\n第二行"


def test_a_terminal_shows_responses_and_does_not_obey_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    rows = two_groups()
    for row in rows:
        row["output"] = row["input"] = HOSTILE
        row["group"] = "\x1b[31m" + row["group"]
        row["uid"] = "\x1b[31m" + row["uid"]
        row["rewards"]["\x1b[5mz"] = 0
    write(tmp_path, {1: rows}, GDPO)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "x1b[2J" in printed.out and "第二行" in printed.out
    assert all(c.isprintable() or c == "\n" for c in printed.out + printed.err)
