"""Our estimator through the functions of verl's V1 trainers, without starting one."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import ray
from datasets import Dataset
from test_settings import run_config
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl_batch import GROUPS, REWARDS, algorithm, batch

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.reward_rows import EstimatorInput, RewardError, RewardRows, current_input
from verl_gdpo.rewards import BOUNDS, SCORERS
from verl_gdpo.settings import GdpoSettings
from verl_gdpo.support import TRAINERS
from verl_gdpo.trainer import GdpoTrainer, check_reward_workers
from verl_gdpo.variants import dara, dvao, gd2po, rvpo, sa_mrpo


def test_the_support_table_has_verls_trainers():
    assert set(TRAINER_REGISTRY) == {"sync", "colocate_async", "separate_async"} <= set(TRAINERS)


def v1_advantages(keys, infos, padding, declared=None, **settings):
    data = batch()
    data.non_tensor_batch["uid"] = np.array([key.split("_")[0] for key in keys], dtype=object)
    rows = RewardRows.from_keys(keys, infos, ["d"] * len(keys), padding)
    given = GdpoSettings.from_algorithm(algorithm(**settings))
    given = replace(given, bounds={**(declared or {}), **given.bounds})
    token = current_input.set(EstimatorInput(rows, given))
    try:
        data = compute_advantage_for_multi_trajectories(
            data, batch_keys=keys, adv_estimator="gdpo", config=algorithm(**settings)
        )
    finally:
        current_input.reset(token)
    return data.batch["advantages"]


@pytest.mark.parametrize("otherwise", ["zero", "missing"])
def test_v1_conditions(otherwise):
    condition = {"reward": "a", "at_least": 1}
    rewards = {"a": 1.0, "b": {"when": condition, "otherwise": otherwise}}
    # group a qualifies with the values 4, 2; group b with 3, 7, 5
    values = [(1, 4), (1, 2), (0, 9), (0, 8), (3, 3), (3, 7), (-3, 6), (1, 5)]
    keys = [f"{group}_{i}_0" for i, group in enumerate(GROUPS)]
    infos = [{"a": float(a), "b": float(b)} for a, b in values]
    actual = v1_advantages(keys, infos, [False] * 8, rewards=rewards)
    met = [a >= 1 for a, _ in values]
    expected = oracle.gdpo(
        [[a, b if ok else 0] for (a, b), ok in zip(values, met, strict=True)],
        GROUPS,
        present=[[True, ok or otherwise == "zero"] for ok in met],
    )
    assert actual[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batch_norm", ["sample", "token", "none"])
def test_v1_sessions_padding_and_row_order(batch_norm):
    infos = [{"a": float(r[0]), "b": float(r[1])} for r in REWARDS]
    # session a_0 has the rows 0 and 5, of which 5 is the last; row 2 is padding
    keys = ["a_0_0", "b_1_0", "padx_0_0", "b_0_0", "a_2_0", "a_0_1", "a_1_0", "b_2_0"]
    padding = [key.startswith("pad") for key in keys]
    actual = v1_advantages(keys, infos, padding, batch_norm=batch_norm)
    counted = [i for i in range(8) if i not in (0, 2)]
    expected = oracle.gdpo(
        [REWARDS[i] for i in counted],
        [keys[i][0] for i in counted],
        lengths=[i + 1 for i in counted],
        batch_norm=batch_norm,
    )
    assert actual[counted, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert actual[0, 0] == actual[5, 0] != 0
    assert actual[2].tolist() == [0.0] * 8


VARIANT_SETTINGS = [
    ({"name": "rvpo", "k": 2.0}, functools.partial(rvpo, k=2.0)),
    ("dara", dara),
    ({"name": "dara", "mode": "asymmetric"}, functools.partial(dara, mode="asymmetric")),
    ("sa_mrpo", functools.partial(sa_mrpo, bounds_K=[(-3, 3), (0, 1)])),
    ({"name": "gd2po", "tau": 0.6}, functools.partial(gd2po, tau=0.6)),
    ("dvao", dvao),
]
# a varies in both groups, b in the first alone
KEYS = [f"{group}_{i}_0" for i, group in enumerate(GROUPS)]
INFOS = [{"a": float(a), "b": float(b)} for a, b in REWARDS]


@pytest.mark.parametrize(
    ("setting", "combine"), VARIANT_SETTINGS, ids=[str(setting) for setting, _ in VARIANT_SETTINGS]
)
def test_v1_variants(setting, combine):
    bounds = {"a": (-3.0, 3.0), "b": (0.0, 1.0)}
    rewards = {"a": 2.0, "b": 1.0}
    actual = v1_advantages(KEYS, INFOS, [False] * 8, bounds, rewards=rewards, combine=setting)
    expected = compute_gdpo_advantage(REWARDS, GROUPS, [[1]] * 8, weights=[2, 1], combine=combine)
    assert actual[:, 0].tolist() == pytest.approx(expected[:, 0].tolist(), abs=1e-6)
    plain = v1_advantages(KEYS, INFOS, [False] * 8, rewards=rewards)
    assert (actual - plain).abs().max() > 1e-3


def test_the_bounds_that_a_variant_needs():
    rewards = {"a": {"weight": 1.0, "bounds": [-3, 3]}, "b": 1.0}
    with pytest.raises(RewardError, match=r"reward 'b' lies.*Set algorithm.gdpo.rewards.b="):
        v1_advantages(KEYS, INFOS, [False] * 8, rewards=rewards, combine="sa_mrpo")
    # what is not used needs none
    v1_advantages(KEYS, INFOS, [False] * 8, rewards={**rewards, "b": 0.0}, combine="sa_mrpo")


def test_a_condition_that_makes_a_reward_0_widens_its_bounds():
    when = {"reward": "b", "at_least": 1}
    rewards = {"a": {"weight": 1.0, "bounds": [1, 5], "when": when}}
    infos = [{"a": float(i % 5 + 1), "b": float(i % 2)} for i in range(8)]
    actual = v1_advantages(KEYS, infos, [False] * 8, rewards=rewards, combine="sa_mrpo")
    assert actual.abs().max() > 0.1


def test_legacy_trainer_with_a_variant():
    values = np.array(REWARDS)
    data = batch({"a": values[:, 0], "b": values[:, 1]}, reward_extra_keys=["a", "b"])
    bounds = {"a": {"bounds": [-3, 3]}, "b": {"bounds": [0, 1]}}
    settings = algorithm(rewards=bounds, combine={"name": "sa_mrpo", "gamma": 2.0})
    data = ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=settings)
    combine = functools.partial(sa_mrpo, bounds_K=[(-3, 3), (0, 1)], gamma=2.0)
    expected = compute_gdpo_advantage(REWARDS, GROUPS, [[1]] * 8, combine=combine)
    actual = data.batch["advantages"][:, 0].tolist()
    assert actual == pytest.approx(expected[:, 0].tolist(), abs=1e-6)


def test_v1_without_rows_says_why():
    with pytest.raises(RewardError, match="no named reward"):
        ray_trainer.compute_advantage(batch(), adv_estimator="gdpo", config=algorithm())


class LoadsRows:
    """As much of a trainer as loads the data."""

    def __init__(self, config):
        self.config = config

    def _init_dataloader(self):
        row = {"data_source": "rlla", "reward_model": {"ground_truth": "<think> x </think>"}}
        self.train_dataset = SimpleNamespace(dataframe=Dataset.from_list([row]))
        self.val_dataset = SimpleNamespace(dataframe=None)


def test_the_training_rows_tell_whose_bounds_hold(monkeypatch):
    monkeypatch.setitem(SCORERS, "other", lambda response, truth, **_: {"correctness": 1.0})
    monkeypatch.setitem(BOUNDS, "other", lambda: {"correctness": (0.0, 1.0)})
    trainer = type("Trainer", (GdpoTrainer, LoadsRows), {})(run_config())
    assert "correctness" not in trainer.gdpo.bounds
    trainer._init_dataloader()
    assert trainer.gdpo.bounds["correctness"] == (-3.0, 3.0)


# --- the reward workers --------------------------------------------------------------------------


class Worker:
    """Answers like a Ray actor whose reward manager comes from `module`."""

    def __init__(self, module):
        self.module = module
        self.__ray_call__ = self

    def remote(self, _):
        return self.module, f"node of {self.module}"


def test_a_node_without_the_package_is_named(monkeypatch):
    monkeypatch.setattr("ray.get", list)
    check_reward_workers([Worker("verl_gdpo.reward_manager")])
    with pytest.raises(RuntimeError, match=r"nodes \['node of verl.x'\] .* Install verl-gdpo=="):
        check_reward_workers([Worker("verl_gdpo.reward_manager"), Worker("verl.x")])


def test_a_reward_worker_that_cannot_answer(monkeypatch):
    def fail(_):
        raise ray.exceptions.RaySystemError("No module named 'verl_gdpo'")

    monkeypatch.setattr("ray.get", fail)
    with pytest.raises(RuntimeError, match=r"No module named 'verl_gdpo'.* Install verl-gdpo=="):
        check_reward_workers([Worker("verl_gdpo.reward_manager")])
