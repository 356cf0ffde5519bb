"""Our estimator through the functions of verl's V1 trainers, without starting one."""

import functools
import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import ray
from added_task import add_task
from composed_recipes import composed
from datasets import Dataset
from listed_functions import manager_of
from omegaconf import OmegaConf
from run_config import listed, run_config
from stand_in import stand_in
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer, trainer_base, utils
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl_batch import GROUPS, REWARDS, algorithm, batch

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.algorithm.variants import dara, dvao, gd2po, rvpo, sa_mrpo
from verl_gdpo.hooks import trainer as trainer_hooks
from verl_gdpo.hooks.advantage_step import AdvantageStep
from verl_gdpo.hooks.before_training import check_reward_workers
from verl_gdpo.hooks.extend import extend_instance, record_of
from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.hooks.trainer import TrainerRecord
from verl_gdpo.tasks import TASK_BY_SOURCE, TASKS


def test_the_table_in_docs_has_verls_trainers():
    """docs/trainers.md names them; `test_readme.py` reads its table."""
    assert set(TRAINER_REGISTRY) == {"sync", "colocate_async", "separate_async"}


def v1_advantages(keys, infos, padding, declared=None, **settings):
    data = batch()
    data.non_tensor_batch["uid"] = np.array([key.split("_")[0] for key in keys], dtype=object)
    rows = BatchRows.from_keys(keys, infos, ["d"] * len(keys), padding)
    given = read_settings(algorithm(**settings))
    given = replace(given, bounds={**(declared or {}), **given.bounds})
    with AdvantageStep(given, rows):
        data = compute_advantage_for_multi_trajectories(
            data, batch_keys=keys, adv_estimator="gdpo", config=algorithm(**settings)
        )
    return data.batch["advantages"]


def test_a_v1_trainer_has_one_step():
    """Its function calls that of the legacy trainer, in which ours opens a step."""
    assert inspect.unwrap(utils.compute_advantage) is not utils.compute_advantage
    rows = BatchRows.from_columns({"a": [1.0] * 8}, ["u"] * 8)
    with AdvantageStep(GdpoSettings(), rows) as step:
        utils.compute_advantage(batch(), adv_estimator="gdpo", config=algorithm())
    assert step.scalars is not None and step.advantages is None


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
        # the tokens of all rows of a session count
        lengths=[1 + 6 if i == 5 else i + 1 for i in counted],
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
    with pytest.raises(RewardError, match=r"reward 'b'.*Set algorithm.gdpo.rewards.b="):
        v1_advantages(KEYS, INFOS, [False] * 8, rewards=rewards, combine="sa_mrpo")
    # what is not used needs none
    v1_advantages(KEYS, INFOS, [False] * 8, rewards={**rewards, "b": 0.0}, combine="sa_mrpo")


class LoadsRows:
    """As much of a trainer as loads the data."""

    def __init__(self, config):
        self.config = config

    def _init_dataloader(self):
        row = {"data_source": "rlla", "reward_model": {"ground_truth": "<think> x </think>"}}
        self.train_dataset = SimpleNamespace(dataframe=Dataset.from_list([row]))
        self.val_dataset = SimpleNamespace(dataframe=None)


def extended(trainer_cls):
    trainer = trainer_cls(run_config(trainer={"resume_mode": "disable"}))
    record = TrainerRecord.of(trainer.config)
    extend_instance(trainer, "PPOTrainer", record)
    return trainer


def test_the_training_rows_tell_whose_bounds_hold(monkeypatch):
    scored = {"correctness": 1.0}
    bounds = {"correctness": (0.0, 1.0)}
    add_task(monkeypatch, "other", lambda response, truth, **_: scored, lambda: bounds)
    trainer = extended(LoadsRows)
    assert "correctness" not in record_of(trainer).settings.bounds
    trainer._init_dataloader()
    assert record_of(trainer).settings.bounds["correctness"] == (-3.0, 3.0)


# --- the reward workers --------------------------------------------------------------------------


class Worker:
    """Answers like a Ray actor with this reward manager."""

    def __init__(self, reward_manager):
        self.reward_manager = reward_manager
        self.__ray_call__ = SimpleNamespace(remote=lambda function, *args: function(self, *args))


def test_a_node_without_the_package_is_named(monkeypatch):
    monkeypatch.setattr("ray.get", list)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    of_ours = type("Mine", (GdpoRewardManager,), {"is_custom": False})
    check_reward_workers([Worker(object.__new__(of_ours))], ())
    with pytest.raises(RuntimeError, match=r"nodes \['10.0.0.7'\] .* Install verl-gdpo=="):
        check_reward_workers([Worker(object.__new__(of_ours)), Worker(None)], ())


class SetsUp(LoadsRows):
    def _setup(self):
        self._init_dataloader()
        self.reward_loop_manager = SimpleNamespace(reward_loop_workers=["a worker"])


def test_the_trainer_asks_the_workers_about_the_data_sources_of_its_rows(monkeypatch):
    asked = []
    monkeypatch.setattr(trainer_hooks, "check_reward_workers", lambda *given: asked.append(given))
    trainer = extended(SetsUp)
    stand_in(trainer_hooks.set_up, SetsUp._setup)(trainer)
    assert asked == [(["a worker"], {"rlla"})]


def test_a_node_that_cannot_score_the_rows_is_named(monkeypatch):
    """Before training."""

    def refuse(**options):
        assert options == {"weak_sandbox": False}
        raise OSError("no sandbox works here")

    monkeypatch.setattr("ray.get", list)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    task = replace(TASK_BY_SOURCE["verl_gdpo/coding"], missing=refuse)
    monkeypatch.setitem(TASK_BY_SOURCE, "verl_gdpo/coding", task)
    manager = object.__new__(GdpoRewardManager)
    manager.is_custom, manager._sources, manager.settings = False, {}, GdpoSettings()
    kwargs = {"reward_kwargs": {"weak_sandbox": False}}
    manager.config = OmegaConf.create({"reward": kwargs})
    check_reward_workers([Worker(manager)], {"rlla", "of a user"})
    with pytest.raises(RuntimeError, match=r"on node 10.0.0.7: no sandbox works here"):
        check_reward_workers([Worker(manager)], {"rlla", "verl_gdpo/coding"})


@pytest.mark.usefixtures("event_loop")
def test_a_node_that_cannot_score_a_task_of_the_list_is_named(monkeypatch):
    def refuse(**options):
        raise OSError(f"no sandbox works here {options}")

    monkeypatch.setattr("ray.get", list)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setitem(TASKS, "coding", replace(TASKS["coding"], missing=refuse))
    entry = {"task": "coding", "sources": ["programs"], "seconds": 2, "weight": 1.0}
    manager = manager_of(listed({"code": entry}))
    check_reward_workers([Worker(manager)], {"rlla"})
    with pytest.raises(RuntimeError, match=r"10.0.0.7: no sandbox works here {'seconds': 2}"):
        check_reward_workers([Worker(manager)], {"rlla", "programs"})


def test_a_reward_worker_that_cannot_answer(monkeypatch):
    def fail(_):
        raise ray.exceptions.RaySystemError("No module named 'verl_gdpo'")

    monkeypatch.setattr("ray.get", fail)
    with pytest.raises(RuntimeError, match=r"No module named 'verl_gdpo'.* Install verl-gdpo=="):
        check_reward_workers([Worker(None)], ())


# --- which trainers are extended -----------------------------------------------------------------

MANAGER = """
from verl_gdpo.hooks.reward_manager import GdpoRewardManager

class Mine(GdpoRewardManager):
    pass
"""


@pytest.fixture
def own_manager(tmp_path):
    """Overrides that make verl load a subclass of our manager, for its own grpo."""
    (tmp_path / "mine.py").write_text(MANAGER)
    return [
        "estimator=grpo",
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=Mine",
        f"reward.reward_manager.module.path={tmp_path}/mine.py",
    ]


class OwnTrainer(PPOTrainer):
    """As users write them."""

    def on_sample_begin(self):
        pass

    on_sample_end = on_step_end = on_sample_begin


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(trainer_base, "TRAINER_REGISTRY", {**trainer_base.TRAINER_REGISTRY})
    register_trainer("own")(OwnTrainer)


@pytest.mark.usefixtures("registered")
def test_a_trainer_of_a_users_is_extended_however_it_is_made():
    for trainer in (
        OwnTrainer(composed("hardware=cpu")),
        get_trainer_cls("own")(config=composed("hardware=cpu")),
    ):
        assert type(trainer) is OwnTrainer
        assert record_of(trainer) and record_of(trainer.replay_buffer)


@pytest.mark.usefixtures("registered")
def test_a_subclass_of_our_manager_is_ours_under_any_name(own_manager):
    trainer = get_trainer_cls("own")(
        composed("hardware=cpu", "trainer.v1.trainer_mode=own", *own_manager)
    )
    assert record_of(trainer)
    assert record_of(trainer.replay_buffer)  # which stops at an error
    naive = ["estimator=grpo", "reward.reward_manager.name=naive", "trainer.v1.trainer_mode=own"]
    trainer = get_trainer_cls("own")(composed("hardware=cpu", *naive))
    assert record_of(trainer) is record_of(trainer.replay_buffer) is None


class MadeOtherwise(OwnTrainer):
    """Makes what it needs by itself."""

    def __init__(self, name, config):
        self.config = config


def test_a_trainer_that_is_not_extended_stops_before_it_loads_a_model(own_manager, monkeypatch):
    reached = []
    monkeypatch.setattr(PPOTrainer, "_init_tokenizer", lambda self: reached.append(1) or 1 / 0)
    how = r"test_trainer.MadeOtherwise is not extended .* did not call that of verl's PPOTrainer"
    for overrides in ([], ["estimator=grpo"], own_manager):
        with pytest.raises(RuntimeError, match=how):
            MadeOtherwise("mine", composed("hardware=cpu", *overrides)).init()
    assert not reached
    plain = ["estimator=grpo", "reward.reward_manager.name=naive"]
    for trainer in (
        OwnTrainer(composed("hardware=cpu", *own_manager)),
        MadeOtherwise("mine", composed("hardware=cpu", *plain)),
    ):
        with pytest.raises(ZeroDivisionError):
            trainer.init()
    assert reached == [1, 1]
