"""The legacy trainer, with verl's own reward loop and functions.

These tests run on the installed verl, and with `nox -s verl` on another one.
"""

import asyncio
import inspect
from types import SimpleNamespace
from unittest.mock import Mock, patch

import datasets
import numpy as np
import oracle
import pytest
import ray
import torch
from byte_tokenizer import make_tokenizer
from omegaconf import OmegaConf
from stand_in import stand_in
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo import core_algos, metric_utils, ray_trainer
from verl.trainer.ppo.reward import extract_reward
from verl_batch import GROUPS, REWARDS, algorithm, batch, verl_config

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import NOTES_KEY, RewardError
from verl_gdpo.hooks import fully_async, legacy
from verl_gdpo.hooks.advantage_step import current_step
from verl_gdpo.hooks.agent_loop import INFO, IS_OURS
from verl_gdpo.hooks.estimator import fitting
from verl_gdpo.hooks.extend import attach, record_of
from verl_gdpo.hooks.legacy import leave_out_none
from verl_gdpo.hooks.rollout_guard import RolloutError, RolloutGuard
from verl_gdpo.hooks.trainer import averages_ours, update_validation_metrics
from verl_gdpo.plugin import refusals
from verl_gdpo.tools.run_folder.dump_reader import read_dump

# 1 to 8 tokens in groups of four, less the mean of the group
LENGTHS_WITHIN_GROUPS = [-1.5, -0.5, 0.5, 1.5] * 2


def test_the_plugin_is_loaded():
    assert refusals == []
    assert get_reward_manager_cls("gdpo").__module__ == "verl_gdpo.hooks.reward_manager"


def columns_of(rewards=REWARDS, names="ab"):
    return dict(zip(names, np.array(rewards).T, strict=False))


def data_of(names="ab", rewards=REWARDS):
    """A batch with the rewards in columns of these names."""
    columns = columns_of(rewards, names)
    return batch(columns, reward_extra_keys=list(columns))


def estimated(data, **settings):
    """As verl's legacy trainer calls it."""
    return ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=algorithm(**settings))


# --- from a response to its advantage ------------------------------------------------------------

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    brief = None if ground_truth == "Oslo" else 1 / extra_info["response_tokens"]
    return {"found": float(ground_truth in solution_str), "brief": brief}
"""
ANSWERS = {"Oslo": ["Oslo", "Lima", "Oslo or Lima"], "Lima": ["Oslo", "Lima", "Oslo or Lima"]}


def rollouts(tokenizer):
    """What verl's agent loop hands to the reward loop: one row an answer, padded to the right."""
    truths = [truth for truth, answers in ANSWERS.items() for _ in answers]
    encoded = [tokenizer.encode(a) for answers in ANSWERS.values() for a in answers]
    width = max(map(len, encoded))
    lengths = torch.tensor([len(ids) for ids in encoded])
    mask = (torch.arange(width)[None, :] < lengths[:, None]).long()
    responses = torch.tensor(
        [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in encoded]
    )
    prompts = torch.ones(len(encoded), 2, dtype=torch.long)
    return lengths, DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones_like(prompts), mask], dim=1),
        },
        non_tensors={
            "uid": np.array(truths, dtype=object),
            "data_source": np.array(["cities"] * len(truths), dtype=object),
            "reward_model": np.array([{"ground_truth": t} for t in truths], dtype=object),
        },
    )


def test_from_a_response_to_its_advantage(tmp_path, monkeypatch, event_loop):
    """verl's worker scores, its manager assembles, its function estimates; Ray is a double."""
    (tmp_path / "scorer.py").write_text(SCORER)
    make_tokenizer(tmp_path / "model")
    config = verl_config(
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"reward.custom_reward_function.path={tmp_path}/scorer.py",
        "+algorithm.gdpo.rewards.found=1.0",
        "+algorithm.gdpo.rewards.brief=0.5",
    )
    worker = RewardLoopWorker(config)
    score = SimpleNamespace(
        remote=lambda chunk: event_loop.run_until_complete(worker.compute_score_batch(chunk))
    )
    manager = object.__new__(RewardLoopManager)
    manager.reward_loop_workers = [SimpleNamespace(compute_score_batch=score)]
    manager.reward_manager_cls = type(worker.reward_manager)
    manager.reward_model_manager = None
    monkeypatch.setattr(ray, "get", list)
    lengths, data = rollouts(worker.input_tokenizer)
    data = data.union(manager.compute_rm_score(data))

    rewards, columns = extract_reward(data)
    found = [1, 0, 1, 0, 1, 1]
    brief = [None] * 3 + [1 / length for length in lengths[3:].tolist()]
    assert columns["found"].tolist() == found
    assert columns["brief"].tolist() == pytest.approx(brief)
    total = [f + 0.5 * (b or 0) for f, b in zip(found, brief, strict=True)]
    assert rewards.sum(dim=1).tolist() == pytest.approx(total)

    data.batch["token_level_rewards"] = rewards
    data = ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=config.algorithm)
    expected = oracle.gdpo(
        [[f, b or 0] for f, b in zip(found, brief, strict=True)],
        data.non_tensor_batch["uid"].tolist(),
        weights=[1.0, 0.5],
        present=[[True, b is not None] for b in brief],
    )
    assert data.batch["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-6)


# --- compute_advantage ---------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"rewards": {"correctness": 1.0, "format": 1.0}}])
def test_legacy_trainer_hands_over_the_columns(settings):
    values = np.array(REWARDS)
    columns = {"correctness": values[:, 0], "format": values[:, 1], "score": values.sum(1)}
    data = batch(columns, reward_extra_keys=list(columns))
    data = ray_trainer.compute_advantage(
        data, adv_estimator="gdpo", config=algorithm(**settings), norm_adv_by_std_in_grpo=True
    )
    expected = oracle.gdpo(REWARDS, GROUPS)
    actual = data.batch["advantages"]
    assert actual[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(actual != 0, (data.batch["response_mask"] != 0) & (actual[:, :1] != 0))
    assert torch.equal(actual, data.batch["returns"])
    logged = data.meta_info["gdpo_metrics"]
    assert logged["gdpo/correctness/min"] == -3.0
    correlation = np.corrcoef(LENGTHS_WITHIN_GROUPS, expected)[0, 1]
    assert logged["gdpo/length_correlation"] == pytest.approx(correlation)
    assert current_step() is None


def test_other_estimators_are_verls_own():
    data = ray_trainer.compute_advantage(batch(), adv_estimator="grpo", config=algorithm())
    expected = oracle.gdpo(
        [[sum(row) * (i + 1)] for i, row in enumerate(REWARDS)],
        GROUPS,
        batch_norm="none",
        eps=1e-6,
    )
    actual = data.batch["advantages"][:, 0].tolist()
    assert actual == pytest.approx(expected, abs=1e-5)
    assert "gdpo_metrics" not in data.meta_info


class Trainer(ray_trainer.RayPPOTrainer):
    """As much of a trainer as loads its data and calls compute_advantage."""

    global_steps = 1

    def __init__(self, *overrides, sources=()):
        self.config = verl_config("trainer.use_v1=False", *overrides)
        truths = [{"ground_truth": "<think> x </think>"}] * len(sources)
        columns = {"data_source": [*sources], "reward_model": truths}
        dataset = SimpleNamespace(dataframe=datasets.Dataset.from_dict(columns))
        self.train_dataset, self.val_dataset = dataset, None
        stand_in(legacy.create_dataloader, lambda self, *loaded: None)(self, 1, 2)

    def fit(self, data, **arguments):
        estimator = self.config.algorithm.adv_estimator
        return ray_trainer.compute_advantage(data, adv_estimator=estimator, **arguments)


class AsyncTrainer(Trainer):
    """As the trainers of verl.experimental are."""

    async def fit(self, data, **arguments):
        await asyncio.sleep(0)
        return super().fit(data, **arguments)


class DecoratedTrainer(AsyncTrainer):
    """As after a decorator: `fit` returns a coroutine, and is no coroutine function."""

    def fit(self, data, **arguments):
        return super().fit(data, **arguments)


class ReloadingTrainer(Trainer):
    """As for a curriculum, which loads other data later."""

    def fit(self, data, **arguments):
        stand_in(legacy.create_dataloader, lambda self, *loaded: None)(self, 1, 2)
        return super().fit(data, **arguments)


def fitted(trainer, *args, **kwargs):
    result = trainer.fit(*args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def test_the_grpo_arm_on_the_legacy_trainer():
    data = data_of()
    # as the reward manager does: the score is the sum, on one token
    data.batch["token_level_rewards"] = torch.zeros(8, 8)
    data.batch["token_level_rewards"][:, 0] = torch.tensor(REWARDS).sum(dim=1)
    for settings in ([], ["+algorithm.gdpo.batch_norm=token"]):
        data = Trainer("algorithm.adv_estimator=grpo", *settings).fit(data)
        advantages = data.batch["advantages"][:, 0].tolist()
        logged = data.meta_info["gdpo_metrics"]
        correlation = np.corrcoef(LENGTHS_WITHIN_GROUPS, advantages)[0, 1]
        assert logged["gdpo/length_correlation"] == pytest.approx(correlation, abs=1e-5)
        # group a: sums 2 1 1 0; group b: 4 4 -2 1.5
        assert logged["gdpo/cancelled"] == 2 / 8
        assert len({round(a, 4) for a in advantages}) == logged["gdpo/distinct_grpo"] == 6
        assert "gdpo/batch_norm_mean" not in logged


@pytest.mark.parametrize("manager", ["gdpo", "naive"])
def test_the_rewards_of_the_grpo_arm_are_looked_at_where_the_manager_is_ours(manager):
    trainer = Trainer("algorithm.adv_estimator=grpo", f"reward.reward_manager.name={manager}")
    data = trainer.fit(data_of("a"))
    assert ("gdpo_metrics" in data.meta_info) == (manager == "gdpo")
    assert (record_of(trainer) is not None) == (manager == "gdpo")


def test_the_bounds_of_our_scorers_reach_the_metrics_and_the_variants():
    trainer = Trainer("+algorithm.gdpo.combine=sa_mrpo", sources=["rlla", "rlla"])
    data = trainer.fit(data_of(["correctness", "format"]))
    logged = data.meta_info["gdpo_metrics"]
    assert logged["gdpo/correctness/at_high"] == 2 / 8
    assert logged["gdpo/correctness/at_low"] == 1 / 8


@pytest.mark.parametrize("kind", [Trainer, AsyncTrainer, DecoratedTrainer, ReloadingTrainer])
def test_the_settings_of_the_start_hold_for_a_trainer_that_hands_none_over(kind):
    """As verl's entropy recipe does: rewards 0 and 1 in a group of two are -+ .5 then."""
    settings = ["+algorithm.gdpo.batch_norm=none", "algorithm.norm_adv_by_std_in_grpo=False"]
    data = fitted(kind(*settings), data_of("a", [[0.0], [1.0]] * 4))
    assert data.batch["advantages"][:, 0].tolist() == [-0.5, 0.5] * 4
    assert current_step() is None


def test_a_trainer_that_calls_the_estimator_itself():
    estimator = core_algos.get_adv_estimator_fn("gdpo")
    data = batch({"a": np.array([0.0, 1.0] * 4)})
    arguments = {
        "token_level_rewards": data.batch["token_level_rewards"],
        "response_mask": data.batch["response_mask"],
        "index": data.non_tensor_batch["uid"],
        "non_tensor_batch": data.non_tensor_batch,
        "config": None,
    }
    trainer = Trainer("+algorithm.gdpo.batch_norm=none", "+algorithm.gdpo.rewards.a=1.0")
    with patch.object(ray_trainer, "compute_advantage", lambda *_, **__: estimator(**arguments)):
        advantages, _ = trainer.fit(data)
    expected = oracle.gdpo([[0.0], [1.0]] * 4, GROUPS, batch_norm="none")
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_loop_of_the_user_has_to_say_its_settings():
    with pytest.raises(ValueError, match=r"without `config`.*Pass config=config.algorithm"):
        ray_trainer.compute_advantage(data_of("a"), adv_estimator="gdpo")


def test_weights_with_a_schedule():
    """The manager needs the step with each row, and the advantage has that of the training."""
    rewards = ["+algorithm.gdpo.rewards.a=1.0", "+algorithm.gdpo.rewards.b.weight={1: 0.0, 5: 1.0}"]
    trainer = Trainer(*rewards)
    trainer.global_steps = 2
    prompts = batch({"raw_prompt": np.array(["p"] * 8, dtype=object)})
    assert trainer._get_gen_batch(prompts).non_tensor_batch["global_steps"].tolist() == [2] * 8
    data = trainer.fit(data_of())
    expected = oracle.gdpo(REWARDS, GROUPS, weights=[1.0, 0.25])
    assert data.batch["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_metrics_by_data_source_and_of_whole_responses():
    data = data_of("a")
    data.non_tensor_batch["data_source"] = np.array(["x"] * 4 + ["y"] * 4)
    # a tool has answered in the last sample: 8 tokens, of which 4 are trained
    data.batch["attention_mask"] = torch.cat([torch.ones(8, 2), data.batch["response_mask"]], 1)
    data.batch["response_mask"][7, :4] = 0
    data = Trainer().fit(data)
    logged = data.meta_info["gdpo_metrics"]
    assert logged["gdpo/a/mean/x"] == 0.5 and logged["gdpo/a/mean/y"] == 3.5 / 4
    advantages = oracle.gdpo([[a] for a, _ in REWARDS], GROUPS)
    correlation = np.corrcoef(LENGTHS_WITHIN_GROUPS, advantages)[0, 1]
    assert logged["gdpo/length_correlation"] == pytest.approx(correlation)


ROWS = [*range(8)]


@pytest.mark.parametrize("left", [ROWS, [6, 3, 1, 7]], ids=["all", "some, in another order"])
def test_a_dump_has_what_a_v1_trainer_writes(tmp_path, left):
    trainer, columns = dumping_trainer(tmp_path), columns_of()
    data = trainer.fit(batch_to_dump(REWARDS))
    columns = {name: column[left] for name, column in columns.items()}
    trainer._log_rollout_data(data[left], columns, {}, str(tmp_path))
    trainer._shutdown_dump_executor()
    rows = read_dump(tmp_path / "1.jsonl")
    assert [row["uid"] for row in rows] == [f"{'ab'[row // 4]}_{row % 4}_0" for row in left]
    assert [row["trained_tokens"] for row in rows] == [row + 1 for row in left]
    assert [[*row["rewards"].values()] for row in rows] == [REWARDS[row] for row in left]
    assert {row["data_source"] for row in rows} == {"x"} and rows[0]["gts"] == "4"
    expected = oracle.gdpo(REWARDS, GROUPS)
    expected = [expected[row] for row in left]
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-6)


def test_a_step_may_have_several_batches_and_dumps(tmp_path):
    """As with two agents that are trained together. Rows of the step before are not kept."""
    trainer, other = dumping_trainer(tmp_path), [[b, a] for a, b in REWARDS]
    trainer.fit(batch_to_dump(REWARDS, "early"))
    trainer.global_steps = 2
    agents = {
        name: trainer.fit(batch_to_dump(rewards, name))
        for name, rewards in (("x", REWARDS), ("y", other))
    }
    for name, data in agents.items():
        trainer._log_rollout_data(data, {}, {}, str(tmp_path / name))
    trainer._shutdown_dump_executor()
    for name, rewards in (("x", REWARDS), ("y", other)):
        rows = read_dump(tmp_path / name / "2.jsonl")
        assert [[*row["rewards"].values()] for row in rows] == rewards
    with pytest.raises(RuntimeError, match="1 of 1 rows were in no batch"):
        record_of(trainer).dump_rows.columns(["earlya_0_0"])


def batch_to_dump(rewards, agent=""):
    data = data_of(rewards=rewards)
    data.non_tensor_batch["data_source"] = np.array(["x"] * 8)
    data.non_tensor_batch["uid"] = np.array([f"{agent}{uid}" for uid in GROUPS], dtype=object)
    data.batch["token_level_scores"] = data.batch["token_level_rewards"]
    for key in ("prompts", "responses"):
        data.batch[key] = torch.ones_like(data.batch["response_mask"])
    data.non_tensor_batch["reward_model"] = np.array([{"ground_truth": "4"}] * 8, dtype=object)
    return data


def dumping_trainer(folder):
    trainer = Trainer(f"trainer.rollout_data_dir={folder}")
    trainer.tokenizer = SimpleNamespace(
        batch_decode=lambda rows, **_: [f"{len(row)} tokens" for row in rows]
    )
    trainer._init_dump_executor()
    return trainer


@pytest.mark.parametrize("kind", [Trainer, AsyncTrainer])
def test_a_dead_actor_is_named(kind, monkeypatch):
    """rollout_actors finds those of this trainer; test_rollout_guard.py asks real ones."""
    trainer = kind()
    actors = {"reward_loop_worker_handles": ["w"], "agent_loop_workers": ["a"]}
    trainer.reward_loop_manager = trainer.async_rollout_manager = SimpleNamespace(**actors)
    asked = []

    def raise_if_dead(self, seconds):
        asked.extend(self._actors())
        raise RolloutError("reward worker 0 died")

    monkeypatch.setattr(RolloutGuard, "raise_if_dead", raise_if_dead)
    monkeypatch.setattr(ray.actor, "ActorHandle", str)
    died = ray.exceptions.ActorDiedError()
    monkeypatch.setattr(ray_trainer, "compute_advantage", Mock(side_effect=died))
    with pytest.raises(RolloutError, match="reward worker 0 died"):
        fitted(trainer, batch())
    assert asked == ["reward worker 0", "agent loop worker 0"]


@pytest.mark.parametrize("norm", ["sample", "token"])
@pytest.mark.parametrize("mark", [3, 0.5])
def test_lengths_in_the_metrics_count_a_token_once_whatever_marks_it(mark, norm):
    data = data_of("a")
    marked = data.batch["response_mask"] * mark
    marked[0] = marked[0] / mark  # lengths in another proportion than their sums
    data.batch["response_mask"] = marked
    data = estimated(data, batch_norm=norm)
    lengths = np.arange(len(REWARDS)) + 1
    expected = oracle.gdpo(
        [[a] for a, _ in REWARDS], GROUPS, lengths=lengths.tolist(), batch_norm=norm
    )
    correlation = data.meta_info["gdpo_metrics"]["gdpo/length_correlation"]
    assert correlation == pytest.approx(np.corrcoef(LENGTHS_WITHIN_GROUPS, expected)[0, 1])


def test_verls_functions_get_what_they_were_called_with():
    """Ours stand in the place of verl's, whatever a trainer of the user passes."""
    calls = []

    def verls(*args, **kwargs):
        calls.append((args, kwargs))
        return args[1] if isinstance(args[0], Trainer) else {"x": {"verl's": 1}}

    trainer = Trainer()
    stand_in(legacy.create_dataloader, verls)(trainer, 3, 4, collate=5)
    data = batch()
    assert stand_in(legacy.get_gen_batch, verls)(trainer, data) is data
    assert data.non_tensor_batch["global_steps"].tolist() == [1] * 8
    add_ours = stand_in(legacy.compute_all_metrics, verls, like=metric_utils.compute_data_metrics)
    assert add_ours(data, False, n=2) == {"x": {"verl's": 1}}
    columns = (["x"], ["u"], {"a": [1]})
    assert stand_in(legacy.leave_out_none, verls)(*columns, 7, seed=3) == {"x": {"verl's": 1}}

    def of_0_9_1(*args, expected_acc_counts=None, **kwargs):
        return verls(*args, **kwargs)

    stand_in(legacy.leave_out_none, of_0_9_1)(*columns, 8, seed=4)
    assert calls == [
        ((trainer, 3, 4), {"collate": 5}),
        ((trainer, data), {}),
        ((data, False), {"n": 2}),
        ((*columns, 7), {"seed": 3}),
        ((*columns, 8), {"seed": 4}),
    ]


class AsyncTrainer(ray_trainer.RayPPOTrainer):
    """As verl's FullyAsyncTrainer: its own constructor and `fit`, and no `_create_dataloader`."""

    def __init__(self, config, role, *, kind):
        self.config, self.made = config, (role, kind)

    async def fit(self):
        self.fits_in = fitting.get()

    def _get_gen_batch(self, batch):
        return batch

    def _shutdown_dump_executor(self):
        self.dumps_are_written = True


@pytest.mark.parametrize("estimator", ["gdpo", "rloo"])
def test_an_asynchronous_trainer_is_extended_when_it_is_made(estimator):
    is_ours = estimator == "gdpo"
    manager = f"reward.reward_manager.name={'gdpo' if is_ours else 'naive'}"
    config = verl_config(f"algorithm.adv_estimator={estimator}", manager)
    trainer = object.__new__(AsyncTrainer)
    construct = stand_in(fully_async.construct_trainer, AsyncTrainer.__init__)
    construct(trainer, config, "actor", kind="async")
    assert (trainer.config, trainer.made) == (config, ("actor", "async"))
    record = record_of(trainer)
    assert (record is not None) == is_ours
    assert legacy.extend(trainer, config) is record  # once
    asyncio.run(stand_in(fully_async.fit_trainer, AsyncTrainer.fit)(trainer))
    assert trainer.fits_in is (trainer if is_ours else None)
    assert hasattr(trainer, "dumps_are_written") == is_ours
    trainer.global_steps = 3
    rows = DataProto.from_dict(tensors={"x": torch.zeros(2)})
    steps = trainer._get_gen_batch(rows).non_tensor_batch.get("global_steps")
    assert (None if steps is None else steps.tolist()) == ([3, 3] if is_ours else None)


def test_a_trainer_that_has_a_dump_executor_keeps_it():
    """That of one_step_off_policy makes none."""
    made = []
    trainer = Trainer()
    trainer._init_dump_executor = lambda: made.append("ours")
    trainer._dump_executor = "its own"
    stand_in(legacy.create_dataloader, lambda *_: None)(trainer)
    del trainer._dump_executor
    assert made == []
    stand_in(legacy.create_dataloader, lambda *_: None)(trainer)
    assert made == ["ours"]


def test_columns_count_where_verl_has_made_them():
    data = batch({"reward_extra_info": np.array([{"a": 1}] * 8, dtype=object)})
    assert legacy.infos_of(data)[0] == {"a": 1}
    data.meta_info["reward_extra_keys"] = ["a"]
    assert legacy.infos_of(data) is None


def test_without_columns_the_message_says_what_to_do():
    of_none = [batch({"score": np.zeros(8)}, reward_extra_keys=keys) for keys in ([], ["score"])]
    for data in (*of_none, batch()):
        with pytest.raises(RewardError, match=r"derived from verl's PPOTrainer.*non_tensor_batch"):
            estimated(data)


def test_what_is_not_ours_is_handed_on_as_it_came():
    def function(data, adv_estimator, gamma=1.0, config=None):
        return data, adv_estimator, gamma, config

    wrapped = stand_in(legacy.compute_in_step, function)
    assert wrapped("data", "gae", 0.5) == ("data", "gae", 0.5, None)
    assert wrapped(config="c", adv_estimator="grpo", data="data") == ("data", "grpo", 1.0, "c")


def test_every_way_to_call_verls_function():
    results = []
    for arguments, keywords in (
        ([], {"adv_estimator": "gdpo", "config": algorithm()}),
        (["gdpo", 1.0, 1.0, 1, True, algorithm()], {}),
    ):
        data = ray_trainer.compute_advantage(data_of(), *arguments, **keywords)
        results.append(data.batch["advantages"])
    assert torch.equal(*results)
    assert results[0][:, 0].tolist() == pytest.approx(oracle.gdpo(REWARDS, GROUPS), abs=1e-6)


def test_a_penalty_in_the_reward_is_refused_whoever_calls():
    data = data_of("a")
    settings = OmegaConf.merge(algorithm(), {"use_kl_in_reward": True})
    with pytest.raises(ValueError, match="use_kl_in_reward=True with adv_estimator=gdpo"):
        ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=settings)
    rewards = data.batch["token_level_rewards"]
    data.batch["token_level_scores"] = rewards.clone()
    estimated(data)
    data.batch["token_level_scores"] = rewards + 0.1
    with pytest.raises(ValueError, match="token_level_rewards differ from token_level_scores"):
        estimated(data)
    # verl's own estimators use them
    ray_trainer.compute_advantage(data, adv_estimator="grpo", config=algorithm())


def test_settings_are_checked_before_data_or_a_model_is_loaded():
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = verl_config("algorithm.use_kl_in_reward=True")
    with pytest.raises(ValueError, match="use_kl_in_reward=True with adv_estimator=gdpo"):
        trainer._create_dataloader(None, None, None, None)


def test_groups_cannot_be_kept_by_a_mean_here():
    config = verl_config(
        "algorithm.filter_groups.enable=True", "++algorithm.gdpo.keep_groups={a: [0, 1]}"
    )
    with pytest.raises(ValueError, match=r"keep_groups=.*: verl's legacy trainers filter no group"):
        legacy.extend(SimpleNamespace(), config)


def test_verls_own_legacy_trainer_filters_no_groups():
    """A trainer of the user's may, as verl's DAPO recipe does."""
    overrides = ["trainer.use_v1=False", "algorithm.filter_groups.enable=True"]
    with pytest.raises(ValueError, match=r"filter_groups.enable=True .*legacy trainer does not f"):
        legacy.extend(object.__new__(ray_trainer.RayPPOTrainer), verl_config(*overrides))
    assert record_of(Trainer(overrides[1])) is not None


def test_the_notes_of_scorers_stay_dicts():
    """A validation reads them."""
    notes = [{"failed_judge": 0.0}, {"failed_judge": 1.0}]
    infos = np.array([{"a": 1.0, NOTES_KEY: notes[0]}, {"a": None, NOTES_KEY: notes[1]}])
    columns = {INFO: infos, IS_OURS: np.ones(2, dtype=bool), "uid": np.array(["u", "v"])}
    data = DataProto.from_dict(
        tensors={"rm_scores": torch.zeros(2, 3)},
        non_tensors={name: column.astype(object) for name, column in columns.items()},
        meta_info={"reward_extra_keys": []},
    )
    _, columns = extract_reward(data)
    assert columns[NOTES_KEY].tolist() == notes
    assert columns["a"].tolist() == [1.0, None]


def test_a_main_module_that_holds_verls_functions_can_be_pickled():
    """Ray pickles a task runner of `__main__` by value, with all that it names."""
    for name in (
        *("compute_advantage", "compute_data_metrics", "process_validation_metrics"),
        "need_critic",
    ):
        function = getattr(ray_trainer, name)
        again = ray.cloudpickle.loads(ray.cloudpickle.dumps(function))
        assert inspect.unwrap(again).__code__ == inspect.unwrap(function).__code__


# --- validation: verl 0.9.0 and its main cannot average None --------------------------------------


@pytest.fixture
def averaging_ours():
    """As within the validation of a trainer with gdpo: some versions of verl take no None."""
    token = averages_ours.set(True)
    yield
    averages_ours.reset(token)


@pytest.mark.usefixtures("averaging_ours")
def test_validation_of_any_verl_averages_what_is_present():
    infos = {"reward": [1.0, 2.0], "a": [None, 2.0], "b": [None, None]}
    found = ray_trainer.process_validation_metrics(["x", "x"], ["u", "v"], infos)["x"]
    assert found["reward"]["mean@1"] == 1.5
    assert found["a"]["mean@1"] == 2.0
    assert not found.get("b")


@pytest.mark.usefixtures("averaging_ours")
def test_validation_has_the_best_and_the_worst_of_each_reward():
    """A None is no 0 there either: the best of the two samples that have `b` is 3, the worst 2."""
    infos = {"reward": [1.0, 0.0, 4.0], "a": [0.0, 1.0, 1.0], "b": [None, 2.0, 3.0]}
    infos["pred"] = ["x", "y", "y"]
    found = ray_trainer.process_validation_metrics(["s"] * 3, ["u"] * 3, infos)["s"]
    for name in ("reward", "a"):
        assert {"mean@3", "best@2/mean", "worst@3/mean", "maj@3/mean"} <= found[name].keys()
    assert 2 < found["b"]["worst@2/mean"] < found["b"]["best@2/mean"] < 3
    assert "best@3/mean" not in found["b"]


def of_0_9_0(data_sources, sample_uids, infos_dict, seed=42):
    return "verl's own"


def of_0_9_1(data_sources, sample_uids, infos_dict, seed=42, expected_acc_counts=None):
    return "verl's own"


def averaged_by_a_trainer_with_gdpo(verls, *columns):
    trainer = Trainer()
    attach(trainer, SimpleNamespace(settings=GdpoSettings()))

    def verls_update(self, data_sources, sample_uids, reward_extra_infos_dict):
        average = stand_in(leave_out_none, verls)
        return average(data_sources, sample_uids, reward_extra_infos_dict)

    return stand_in(update_validation_metrics, verls_update)(trainer, *columns)


@pytest.mark.parametrize(("verls", "is_called"), [(of_0_9_0, False), (of_0_9_1, True)])
def test_verls_own_validation_is_kept_where_it_takes_none(verls, is_called):
    metrics = averaged_by_a_trainer_with_gdpo(verls, [], [], {})
    assert metrics == ("verl's own" if is_called else {})
    # without gdpo, whatever it takes
    assert stand_in(leave_out_none, verls)([], [], {}) == "verl's own"


def means(data_sources, sample_uids, infos_dict):
    """verl 0.9.0's function, reduced to the mean over a data source."""
    return {
        source: {
            name: {"mean@1": np.mean([column[i] for i in indices])}
            for name, column in infos_dict.items()
        }
        for source in dict.fromkeys(data_sources)
        for indices in [[i for i, other in enumerate(data_sources) if other == source]]
    }


def test_validation_averages_what_is_present():
    infos = {"reward": [1.0, 2.0, 6.0], "a": [None, 2.0, None], "b": [None, None, 6.0]}
    arguments = (["x", "x", "y"], ["u", "v", "w"], infos)
    with pytest.raises(TypeError):
        means(*arguments)
    with pytest.raises(TypeError):  # without gdpo, verl's own is called
        stand_in(leave_out_none, means)(*arguments)
    result = averaged_by_a_trainer_with_gdpo(means, *arguments)
    assert {source: {k: v["mean@1"] for k, v in m.items()} for source, m in result.items()} == {
        "x": {"reward": 1.5, "a": 2.0},
        "y": {"reward": 6.0, "b": 6.0},
    }
