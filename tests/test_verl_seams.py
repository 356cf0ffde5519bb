"""Our estimator through the functions of verl's V1 trainers, without starting one."""

import numpy as np
import oracle
import pytest
import ray
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl_batch import GROUPS, REWARDS, algorithm, batch

from verl_gdpo.reward_rows import RewardError, RewardRows, current_rows
from verl_gdpo.support import TRAINERS
from verl_gdpo.trainer import check_reward_workers


def test_the_support_table_has_verls_trainers():
    assert set(TRAINER_REGISTRY) == {"sync", "colocate_async", "separate_async"} <= set(TRAINERS)


def v1_advantages(keys, infos, padding, **settings):
    data = batch()
    data.non_tensor_batch["uid"] = np.array([key.split("_")[0] for key in keys], dtype=object)
    token = current_rows.set(RewardRows.from_keys(keys, infos, ["d"] * len(keys), padding))
    try:
        data = compute_advantage_for_multi_trajectories(
            data, batch_keys=keys, adv_estimator="gdpo", config=algorithm(**settings)
        )
    finally:
        current_rows.reset(token)
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


def test_v1_without_rows_says_why():
    with pytest.raises(RewardError, match="no named reward"):
        ray_trainer.compute_advantage(batch(), adv_estimator="gdpo", config=algorithm())


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
