"""The estimator as verl calls it, for a trainer that passes its reward columns itself."""

import functools

import numpy as np
import oracle
import pytest
import torch

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings, RewardTerm
from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.algorithm.variants import sa_mrpo
from verl_gdpo.hooks import estimator
from verl_gdpo.hooks.advantage_step import AdvantageStep
from verl_gdpo.hooks.estimator import compute_gdpo

REWARDS = [[1, 1], [1, 0], [0, 1], [0, 0], [3, 1], [3, 1], [-3, 1], [0.5, 1]]
GROUPS = np.array(list("aaaabbbb"), dtype=object)
COLUMNS = {"a": np.array(REWARDS)[:, 0], "b": np.array(REWARDS, dtype=object)[:, 1]}
NAMED = {"rewards": {"a": 1.0, "b": 0.5}}
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]


def mask_of(lengths):
    return (torch.arange(8)[None, :] < torch.tensor(lengths)[:, None]).long()


def estimate(mask=None, columns=COLUMNS, **gdpo):
    mask = mask_of(LENGTHS) if mask is None else mask
    return compute_gdpo(
        token_level_rewards=torch.zeros(mask.shape),
        response_mask=mask,
        index=GROUPS,
        config={"gdpo": gdpo},
        non_tensor_batch=columns,
        batch={},
    )


def test_columns_of_a_trainer_that_is_not_ours():
    advantages, returns = estimate(**NAMED)
    expected = oracle.gdpo(REWARDS, GROUPS.tolist(), weights=[1.0, 0.5])
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages != 0, (mask_of(LENGTHS) != 0) & (advantages[:, :1] != 0))


def test_a_column_that_only_a_condition_reads():
    rewards = {"a": {"when": {"reward": "b", "at_least": 1}, "otherwise": "zero"}}
    met = [[a if b >= 1 else 0] for a, b in REWARDS]
    advantages, _ = estimate(rewards=rewards)
    assert advantages[:, 0].tolist() == pytest.approx(oracle.gdpo(met, GROUPS.tolist()), abs=1e-6)


@pytest.mark.parametrize(
    ("columns", "gdpo"), [(COLUMNS, {}), (None, NAMED), (None, {}), ({}, NAMED)]
)
def test_without_named_columns_the_message_says_what_to_do(columns, gdpo):
    with pytest.raises(RuntimeError, match=r"(?s)verl's PPOTrainer.*non_tensor_batch|'a'"):
        estimate(columns=columns, **gdpo)


def test_a_loop_of_the_users_is_refused_too():
    rewards = {"cost": {"when": {"reward": "right", "at_least": 1}}, "right": 1.0}
    columns = {"right": np.array([1.0, 0.0]), "cost": np.array([-1.0, 0.0])}
    with pytest.raises(RewardError, match=r"cost: a sample .* gets 0 .* better than -1"):
        compute_gdpo(
            torch.zeros(2, 1),
            torch.ones(2, 1),
            np.array(["u", "u"]),
            {"gdpo": {"rewards": rewards}},
            non_tensor_batch=columns,
        )


@pytest.mark.parametrize("rows", [7, 9])
def test_rewards_of_another_number_of_rows(rows):
    columns = {name: np.arange(rows) for name in "ab"}
    step = AdvantageStep(GdpoSettings(), BatchRows.from_columns(columns, ["u"] * rows))
    with step, pytest.raises(RuntimeError, match=f"got 8 rows, but the rewards of {rows} rows"):
        estimate()


@pytest.mark.parametrize("mark", [1.0, 3, 0.5, -1])
def test_a_token_counts_once_whatever_marks_it(mark):
    mask = mask_of(LENGTHS) * mark
    advantages, _ = estimate(mask, batch_norm="token", **NAMED)
    expected = oracle.gdpo(
        REWARDS, GROUPS.tolist(), weights=[1.0, 0.5], lengths=LENGTHS, batch_norm="token"
    )
    assert (advantages[:, 0] / mark).tolist() == pytest.approx(expected, abs=1e-6)


OPTIONS = {
    "group_norm": "summed",
    "normalize_by_std": False,
    "batch_norm": "none",
    "eps": 0.25,
    "batch_eps": 0.5,
    "batch_var_eps": 2.0,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_equation(name):
    rows = BatchRows.from_columns(COLUMNS, ["u"] * 8)

    def of(settings):
        return scalars_of(RewardMatrix.of(rows, settings), rows.counted_B, GROUPS, settings).A_B

    changed = of(GdpoSettings(**{name: OPTIONS[name]}))
    assert (changed - of(GdpoSettings())).abs().max() > 1e-3
    oracle_knows = {"group_norm", "normalize_by_std", "batch_norm"}
    if name in oracle_knows:
        expected = oracle.gdpo(REWARDS, GROUPS.tolist(), **{name: OPTIONS[name]})
        assert changed.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("bounds", "otherwise", "gated_bounds"),
    [
        ([1, 5], "zero", (0, 5)),
        ([-5, -1], "zero", (-5, 0)),
        ([-1, 2], "zero", (-1, 2)),
        ([1, 5], "missing", (1, 5)),
    ],
)
def test_a_condition_that_makes_a_reward_0_widens_its_bounds(bounds, otherwise, gated_bounds):
    values = np.linspace(*bounds, 8)
    met = np.arange(8) % 3 > 0
    when = {"reward": "b", "at_least": 1}
    rewards = {"a": {"bounds": bounds, "when": when, "otherwise": otherwise}}
    columns = {"a": values, "b": met.astype(float)}
    present = met if otherwise == "missing" else met | True

    def check(rewards, values, bounds, **present):
        options = {"combine": "sa_mrpo", "batch_norm": "none"}
        advantages, _ = estimate(None, columns, rewards=rewards, **options)
        options = {"combine": functools.partial(sa_mrpo, bounds_K=[bounds]), "batch_norm": "none"}
        expected = compute_gdpo_advantage(
            values[:, None], GROUPS, mask_of(LENGTHS), **options, **present
        )
        torch.testing.assert_close(advantages, expected)

    check(rewards, np.where(met, values, 0.0), gated_bounds, present=present[:, None])
    # a reward on which no condition is put keeps its own
    check({"a": {"bounds": bounds}}, values, bounds)


RANGES = {"answer": [0.0, 1.0, 1.0], "bonus": [0.05, 0.0, 0.05], "half": [0.5, 0.0, 0.0]}


@pytest.mark.parametrize(
    ("settings", "more", "named"),
    [
        (GdpoSettings(), {}, ["bonus: range 0.05, a tenth or less of answer's 1."]),
        # declared bounds are the range, whatever the values of the batch
        (
            GdpoSettings(bounds={"answer": (0, 6)}),
            {},
            [
                f"{of}, a tenth or less of answer's 6."
                for of in ("bonus: range 0.05", "half: range 0.5")
            ],
        ),
        (GdpoSettings(bounds={"bonus": (0, 1)}), {}, []),
        (GdpoSettings(), {"constant": [7.0] * 3}, ["bonus: range 0.05"]),
        (GdpoSettings(rewards={"answer": RewardTerm(0.0), "bonus": RewardTerm()}), {}, []),
        # these let ranges count
        (GdpoSettings(group_norm="summed"), {}, []),
        (GdpoSettings(normalize_by_std=False), {}, []),
        (GdpoSettings(combine="dvao"), {}, []),
    ],
)
def test_a_range_that_is_no_weight_is_logged_once(settings, more, named, caplog, monkeypatch):
    monkeypatch.setattr(estimator, "_compared", set())
    rows = BatchRows.from_columns(RANGES | more, ["u"] * 3)
    for _ in range(2):
        with AdvantageStep(settings, rows):
            compute_gdpo(torch.zeros(3, 1), torch.ones(3, 1), ["u"] * 3, {})
    lines = [text for text in caplog.messages if "no weight" in text]
    assert len(lines) == len(named)
    for text, start in zip(lines, named, strict=True):
        assert text.startswith(f"verl-gdpo: {start}")
        assert text.endswith("it counts as much as the others; its range is no weight")
