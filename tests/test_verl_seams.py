"""Our estimator and manager through verl's own functions, without starting a trainer."""

import asyncio
import inspect
import re

import numpy as np
import oracle
import pytest
import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_gdpo.reward_manager import GdpoRewardManager
from verl_gdpo.reward_rows import ERROR_KEY, RewardError, RewardRows, current_rows
from verl_gdpo.trainer import check_reward_workers
from verl_gdpo.validation import present_only

REWARDS = [[1, 1], [1, 0], [0, 1], [0, 0], [3, 1], [3, 1], [-3, 1], [0.5, 1]]
GROUPS = list("aaaabbbb")


def batch(columns=None, keys=None, **meta_info):
    size = len(REWARDS)
    mask = (torch.arange(8)[None, :] <= torch.arange(size)[:, None]).long()
    scores = mask * torch.tensor([sum(row) for row in REWARDS])[:, None]
    return DataProto(
        batch=TensorDict(
            {"token_level_rewards": scores.float(), "response_mask": mask}, batch_size=size
        ),
        non_tensor_batch={"uid": np.array(GROUPS, dtype=object), **(columns or {})},
        meta_info=meta_info,
    )


def algorithm(**settings):
    return OmegaConf.create({"adv_estimator": "gdpo", "gdpo": settings})


# --- the legacy trainer's compute_advantage ------------------------------------------------------


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
    assert data.meta_info["gdpo_metrics"]["gdpo/correctness/min"] == -3.0
    assert current_rows.get() is None


def test_legacy_trainer_metrics_reach_verls():
    columns = {"a": np.array(REWARDS)[:, 0]}
    data = batch(columns, reward_extra_keys=["a"])
    ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=algorithm())
    assert inspect.unwrap(ray_trainer.compute_data_metrics) is not ray_trainer.compute_data_metrics
    data.batch["token_level_scores"] = data.batch["token_level_rewards"]
    for key in ("prompts", "responses"):
        data.batch[key] = torch.ones_like(data.batch["response_mask"])
    data.batch["attention_mask"] = torch.ones(len(data), 16, dtype=torch.long)
    metrics = ray_trainer.compute_data_metrics(batch=data, use_critic=False)
    assert metrics["gdpo/a/max"] == 3.0
    assert "critic/score/mean" in metrics


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


def test_without_columns_the_message_says_what_to_do():
    data = batch(reward_extra_keys=[])
    with pytest.raises(RewardError, match="no named reward"):
        ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=algorithm())


def test_legacy_trainer_with_a_missing_reward():
    rewards = [[1, 1], [1, None], [0, 1], [0, 0], [3, None], [3, None], [-3, 1], [0.5, None]]
    values = np.array(rewards, dtype=object)
    columns = {"a": values[:, 0], "b": values[:, 1]}
    data = batch(columns, reward_extra_keys=["a", "b"])
    data = ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=algorithm())
    expected = oracle.gdpo(
        [[a, b or 0] for a, b in rewards],
        GROUPS,
        present=[[True, b is not None] for _, b in rewards],
    )
    assert data.batch["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-6)


# --- V1's compute_advantage ----------------------------------------------------------------------


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


# --- validation on verl 0.9.0 ---------------------------------------------------------------------


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
    result = present_only(means, None, arguments, {})
    assert {source: {k: v["mean@1"] for k, v in m.items()} for source, m in result.items()} == {
        "x": {"reward": 1.5, "a": 2.0},
        "y": {"reward": 6.0, "b": 6.0},
    }


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


# --- the reward manager --------------------------------------------------------------------------

GOLD = '<think> a </think>\n<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>'


class Tokenizer:
    """One token a character; id 0 is special."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(i) for i in ids.tolist() if i)


@pytest.fixture(autouse=True)
def event_loop():
    """verl's base class takes the current loop, as it finds it in a Ray actor."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(None)


def manager(compute_score=None, *, use_v1=True, reward_kwargs=None, **algorithm_keys):
    config = OmegaConf.create(
        {
            "algorithm": algorithm_keys,
            "reward": {
                "custom_reward_function": {"path": compute_score and "scorer.py"},
                **({"reward_kwargs": reward_kwargs} if reward_kwargs else {}),
            },
            "trainer": {"experiment_name": "qwen-run", "use_v1": use_v1},
        }
    )
    return GdpoRewardManager(config, Tokenizer(), compute_score or verls_default)


def verls_default(data_source, solution_str, ground_truth, extra_info):
    return {"score": 9.0, "found": float(len(solution_str)), "source": data_source}


def score(manager, response, ground_truth=GOLD, data_source="rlla", **fields):
    ids = [ord(c) for c in response] + [0]  # the end-of-turn token counts
    row = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[*ids, 7, 7]]),
            "attention_mask": torch.tensor([[0, 1, 1] + [1] * len(ids) + [0, 0]]),
        },
        non_tensors={
            key: np.array([value], dtype=object)
            for key, value in {
                "uid": "u-1",
                "data_source": data_source,
                "reward_model": {"ground_truth": ground_truth, "style": "rule"},
                "extra_info": {"index": 17},
                **fields,
            }.items()
        },
    )
    return manager.loop.run_until_complete(manager.run_single(row))


def test_our_scorer_is_chosen_by_data_source():
    result = score(manager(), GOLD)
    assert result == {
        "reward_score": 4.0,
        "reward_extra_info": {"format": 1.0, "correctness": 3.0, "score": 4.0},
    }


def test_reward_score_is_the_weighted_sum_of_the_named():
    result = score(manager(gdpo={"rewards": {"correctness": 0.5}}), GOLD)
    assert result["reward_score"] == 1.5
    assert result["reward_extra_info"]["format"] == 1.0  # not used, still reported


def test_reward_score_obeys_conditions_and_the_raw_values_stay():
    condition = {"reward": "correctness", "at_least": 3}
    conditioned = manager(
        reward_kwargs={"length": True},
        gdpo={"rewards": {"correctness": 1.0, "length": {"weight": 512.0, "when": condition}}},
    )
    right, wrong = score(conditioned, GOLD), score(conditioned, GOLD.replace('"f"', '"g"'))
    assert right["reward_score"] == 3.0 + 512 * right["reward_extra_info"]["length"]
    assert wrong["reward_score"] == -3.0
    assert wrong["reward_extra_info"]["length"] == right["reward_extra_info"]["length"]


def test_reward_score_has_the_weights_of_the_step():
    scheduled = manager(gdpo={"rewards": {"correctness": {"weight": {0: 1.0, 100: 0.0}}}})
    assert score(scheduled, GOLD, global_steps=0)["reward_score"] == 3.0
    assert score(scheduled, GOLD, global_steps=50)["reward_score"] == 1.5
    message = score(scheduled, GOLD)["reward_extra_info"][ERROR_KEY]
    assert "needs the training step" in message


def test_verls_names_of_the_same_rewards_stay_valid():
    verl_keys = {"gdpo_reward_keys": ["accuracy_reward", "format_reward"]}
    result = score(manager(**verl_keys, gdpo_reward_weights=[1.0, 2.0]), GOLD)
    assert result["reward_score"] == 3.0 + 2.0
    assert result["reward_extra_info"]["accuracy_reward"] == 3.0


def test_options_of_our_scorer():
    info = score(manager(reward_kwargs={"length": True}), GOLD)["reward_extra_info"]
    assert list(info) == ["format", "correctness", "length", "score"]
    scheduled = manager(reward_kwargs={"schedule": "two_stage"})
    assert score(scheduled, GOLD, global_steps=29)["reward_score"] == 1.0 + 1.0
    assert score(scheduled, GOLD, global_steps=30)["reward_score"] == 0.5 + 3.0
    error = score(manager(reward_kwargs={"lenght": True}), GOLD)["reward_extra_info"][ERROR_KEY]
    assert "TypeError" in error and "lenght" in error


def test_none_stays_none_and_adds_nothing():
    result = score(manager(failing({"a": 2.0, "b": None})), "x")
    assert result == {
        "reward_score": 2.0,
        "reward_extra_info": {"a": 2.0, "b": None, "score": 2.0},
    }


def test_configured_rewards_of_other_data_sources_are_missing():
    mixed = manager(gdpo={"rewards": {"format": 1.0, "acc": 1.0}})
    assert score(mixed, GOLD)["reward_extra_info"] == {
        "format": 1.0,
        "correctness": 3.0,
        "acc": None,
        "score": 1.0,
    }
    math = manager(lambda **_: 0.5, gdpo={"rewards": {"format": 1.0, "acc": 1.0}})
    math.is_custom = False  # stands for verl's default, which gives this source a number
    assert score(math, "x", data_source="openai/gsm8k")["reward_extra_info"] == {
        "format": None,
        "acc": 0.5,
        "score": 0.5,
    }
    # `length` is a reward of these very rows, which is not switched on: no other source has it
    unasked = manager(gdpo={"rewards": {"format": 1.0, "length": 1.0}})
    assert "'length' is configured" in score(unasked, GOLD)["reward_extra_info"][ERROR_KEY]


def test_other_sources_go_to_verls_default():
    named = manager(gdpo={"rewards": {"found": 1.0}})
    result = score(named, "abc", data_source="other")
    assert result["reward_score"] == 3.0
    assert result["reward_extra_info"]["source"] == "other"


def test_a_custom_function_comes_first_and_gets_what_verl_gives_it():
    seen = {}

    def scorer(data_source, solution_str, ground_truth, extra_info):
        seen.update(extra_info, response=solution_str)
        return {"a": np.float32(2), "b": True, "score": 99.0}

    fields = {
        "tool_extra_fields": {"tool": "t"},
        "__num_turns__": 3,
        "reward_scores": {"turn": [1]},
    }
    result = score(manager(scorer), "hello", **fields)
    assert result == {
        "reward_score": 3.0,
        "reward_extra_info": {"a": 2.0, "b": 1.0, "score": 3.0},
    }
    assert all(type(value) is float for value in result["reward_extra_info"].values())
    assert seen == {
        "response": "hello",
        "index": 17,
        "tool": "t",
        "num_turns": 3,
        "rollout_reward_scores": {"turn": [1]},
        "experiment_name": "qwen-run",
        "response_tokens": 6,
    }


def test_an_async_function_and_a_plain_number():
    async def scorer(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0)
        return 0.25

    result = score(manager(scorer), "x")
    assert result == {"reward_score": 0.25, "reward_extra_info": {"acc": 0.25, "score": 0.25}}


def failing(value):
    def scorer(data_source, solution_str, ground_truth, extra_info):
        if value is KeyError:
            raise KeyError("city")
        return value

    return scorer


@pytest.mark.parametrize(
    ("scorer", "settings", "reason"),
    [
        (failing(KeyError), {}, r"KeyError: 'city' \[.*test_verl_seams.py:\d+\]"),
        (failing({"a": float("nan")}), {}, "reward 'a' is nan; expected a finite number"),
        (failing({"a": "high"}), {}, "reward 'a' is 'high'"),
        (failing({"score": 1.0}), {}, "returned no named reward"),
        (failing({"a": 1.0}), {"gdpo": {"rewards": {"b": 1}}}, r"'b' is configured.*\['a'\]"),
        (failing(None), {}, "the scorer returned None; expected a number or"),
        (failing({"a": 1.0}), {"gdpo": {"rewards": {"acc": 1}}}, r"'acc' is configured.*\['a'\]"),
    ],
)
def test_what_cannot_be_scored_is_carried_as_an_error(scorer, settings, reason):
    result = score(manager(scorer, **settings), "x")
    assert result["reward_score"] == 0.0
    message = result["reward_extra_info"][ERROR_KEY]
    assert "uid u-1" in message and "extra_info.index 17" in message
    assert re.search(reason, message)
    with pytest.raises(RuntimeError, match="uid u-1"):  # the legacy trainer stops by itself
        score(manager(scorer, use_v1=False, **settings), "x")


def test_a_missing_ground_truth_is_an_error_not_a_low_score():
    message = score(manager(), GOLD, ground_truth=None)["reward_extra_info"][ERROR_KEY]
    assert "ground" in message and "uid u-1" in message
