"""Agent loops that score themselves: verl then asks no reward manager.

verl's own agent loop workers, replay buffer, trainers and functions run; see
`agent_loop_worker.py` for the doubles.
"""

import asyncio
import functools
import json
import math
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import transfer_queue as tq
from agent_loop_worker import (
    NOT_SET,
    WORKER_OF_V1,
    generate_on_legacy,
    generate_on_v1,
    legacy_batch,
    made_output,
    make_worker,
    messages_of,
    results,
)
from memory_queue import MemoryQueue
from omegaconf import OmegaConf
from repository import REPO
from stand_in import stand_in
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo import metric_utils, ray_trainer
from verl.trainer.ppo.v1 import agent_loop_tq, get_trainer_cls
from verl_batch import verl_config

from verl_gdpo.algorithm.values import (
    AGENT_SCORE_KEY,
    OF_AGENT_LOOPS,
    RESERVED_NAMES,
    ROLLOUT_KEY,
    RewardError,
)
from verl_gdpo.hooks import agent_loop, legacy
from verl_gdpo.hooks.rollout_guard import RolloutError

# NeMo Gym's example: three components of 0 or 1, and `reward` as their sum
COMPONENTS = ("correctness", "schema_valid", "format")
GYM = {"p": [(1, 1, 1), (0, 1, 1), (1, 1, 0), (0, 0, 0)], "q": [(0, 1, 1), (0, 1, 0)] * 2}
ROWS, UIDS = [[*row] for rows in GYM.values() for row in rows], [*"ppppqqqq"]


def gym_results(**more):
    return {
        prompt: [
            (float(sum(row)), {**dict(zip(COMPONENTS, map(float, row), strict=True)), **more})
            for row in rows
        ]
        for prompt, rows in GYM.items()
    }


@functools.cache
def config_of(*overrides):
    workers = "actor_rollout_ref.rollout.agent.num_workers=2"
    return verl_config(*overrides, workers, "trainer.rollout_data_dir=is_given_by_the_test")


def config_for(given, *overrides):
    sessions = len(next(iter(given.values())))
    keys = [f"actor_rollout_ref.rollout.{key}" for key in ("n", "val_kwargs.n")]
    return config_of(*overrides, *(f"{key}={sessions}" for key in keys))


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """verl's two kinds of workers; the legacy trainer has two of a kind."""
    folder, patch = tmp_path_factory.mktemp("model"), pytest.MonkeyPatch()
    patch.setattr(tq, "init", lambda *_: None)
    yield [make_worker(cls, folder) for cls in (WORKER_OF_V1, AgentLoopWorker, AgentLoopWorker)]
    patch.undo()


class OnV1:
    """A step and a validation of verl's V1 trainer: verl's worker, replay buffer and functions."""

    def __init__(self, workers, monkeypatch, folder):
        self.worker, self.folder = workers[0], folder
        self.queue = MemoryQueue(monkeypatch)

    def train(self, given, *overrides, sources=None):
        """{prompt: what the agent loop sets in each session} -> {key: advantage}."""
        self.config = self.worker.config = config_for(given, *overrides)
        self._generate(given, [*given], sources or ["d"] * len(given))
        self.trainer = get_trainer_cls("sync")(self.config)
        self.trainer.global_steps, self.trainer.tokenizer = 7, self.worker.tokenizer
        self.batch, _ = self.trainer.replay_buffer.sample(7, "train", len(given))
        self.metrics = {}
        self.trainer._compute_advantage(self.batch, self.metrics)
        rows = self.queue.rows
        return {key: rows[key]["advantages"].tolist()[0] for key in sorted(self.batch.keys)}

    def _generate(self, given, uids, sources, **validate):
        results.update({prompt: [*sessions] for prompt, sessions in given.items()})
        generate_on_v1(self.worker, [*given], uids, sources, **validate)

    def dumped(self):
        self.trainer._init_dump_executor()
        self.trainer._log_rollout_data(self.batch, {}, str(self.folder))
        return [{**row, **row["rewards"]} for row in written(self.trainer, self.folder)]

    def validated(self, given):
        """What the agent loop sets -> (metrics, rows of the dump)."""
        sources = np.array(["d"] * len(given))
        self.trainer.val_dataloader = [{"raw_prompt": messages_of(given), "data_source": sources}]
        self.trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.trainer.agent_loop_manager = SimpleNamespace(
            generate_sequences=lambda batch: self._generate(
                given, [*batch["uid"]], sources, validate=True
            )
        )
        return validated(self.trainer, self.folder)


class LegacyTrainer(ray_trainer.RayPPOTrainer):
    """What verl's `fit` does between the rollouts and the update of the policy."""

    def __init__(self, config, tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.global_steps, self.use_rm = 7, False
        self.train_dataset = self.val_dataset = None
        stand_in(legacy.create_dataloader, lambda self: None)(self)

    def fit(self, data, generate):
        data = data.union(generate(self._get_gen_batch(data)))
        scores, columns = ray_trainer.extract_reward(data)
        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = scores
        data.non_tensor_batch.update({k: np.array(v) for k, v in columns.items()})
        algorithm = self.config.algorithm
        data = ray_trainer.compute_advantage(
            data, adv_estimator=algorithm.adv_estimator, config=algorithm
        )
        return data, columns, ray_trainer.compute_data_metrics(batch=data, use_critic=False)


class OnLegacy:
    """The same on verl's legacy trainer, whose batch is made by two workers."""

    def __init__(self, workers, monkeypatch, folder):
        self.workers, self.folder = workers[1:], folder

    def train(self, given, *overrides, sources=None):
        config = config_for(given, *overrides)
        for worker in self.workers:
            worker.config = config
        self.trainer = LegacyTrainer(config, worker.tokenizer)
        prompts = [prompt for prompt, sessions in given.items() for _ in sessions]
        source_of = dict(zip(given, sources or ["d"] * len(given), strict=True))
        data = legacy_batch(prompts, prompts, [source_of[prompt] for prompt in prompts])
        self.batch, self.columns, self.metrics = self.trainer.fit(
            data, lambda batch: self._generate(given, batch)
        )
        keys = [f"{p}_{i}_0" for p, sessions in given.items() for i in range(len(sessions))]
        return dict(zip(keys, self.batch.batch["advantages"][:, 0].tolist(), strict=True))

    def _generate(self, given, data):
        results.update({prompt: [*sessions] for prompt, sessions in given.items()})
        return generate_on_legacy(self.workers, data)

    def dumped(self):
        self.trainer._init_dump_executor()
        self.trainer._log_rollout_data(self.batch, self.columns, {}, str(self.folder))
        return [{**row, **row["rewards"]} for row in written(self.trainer, self.folder)]

    def validated(self, given):
        batch = legacy_batch([*given], [*given], ["d"] * len(given))
        self.trainer.val_dataloader = [{**batch.non_tensor_batch, **batch.batch}]
        self.trainer.async_rollout_manager = SimpleNamespace(
            generate_sequences=lambda data: self._generate(given, data)
        )
        return validated(self.trainer, self.folder)


def validated(trainer, folder):
    trainer.config.trainer.validation_data_dir = str(folder)
    trainer._init_dump_executor()
    return trainer._validate(), written(trainer, folder)


def written(trainer, folder):
    trainer._shutdown_dump_executor()  # raises what the writing thread raised
    rows = map(json.loads, (folder / "7.jsonl").read_text().splitlines())
    return sorted(rows, key=lambda row: (row["input"], row["score"]))


@pytest.fixture(params=[OnV1, OnLegacy])
def trainer(request, workers, monkeypatch, tmp_path):
    # verl draws 1,000 subsets for each name of a validation, and no test here asks for their best
    draw = metric_utils.bootstrap_metric
    monkeypatch.setattr(
        metric_utils, "bootstrap_metric", lambda **given: draw(**{**given, "n_bootstrap": 2})
    )
    return request.param(workers, monkeypatch, tmp_path)


def test_the_components_of_an_environment_are_rewards(trainer):
    advantages = trainer.train(gym_results())
    assert [*advantages.values()] == pytest.approx(oracle.gdpo(ROWS, UIDS), abs=1e-6)


def scored(values, **more):
    """{prompt: [(sum, {name: value}), ...]} of a table {prompt: [{name: value}, ...]}."""
    return {
        prompt: [(sum(filter(None, row.values())), {**row, **more}) for row in rows]
        for prompt, rows in values.items()
    }


def test_the_example_of_the_documents_fits_verls_output():
    text = (REPO / "docs/trainers.md").read_text()
    code = text.split("<!-- executed by tests/core/hooks/test_agent_loop.py -->\n```python\n")[1]
    space = {}
    exec(code.split("```")[0], space)
    output = made_output(0)
    space["score_as_an_environment"](output, 2.0, {"correctness": 1.0, "format": 1.0})
    field = output.as_dict()
    assert field["rm_scores"].sum() == 2.0
    assert field["extra_fields"]["reward_extra_info"] == {"correctness": 1.0, "format": 1.0}


def test_what_verl_counts_is_no_reward_unless_it_is_named(trainer):
    given = gym_results()
    for sessions in given.values():
        for number, (_, info) in enumerate(sessions):
            info |= {"num_turns": 2 * number, "min_global_steps": number}
    assert [*trainer.train(given).values()] == pytest.approx(oracle.gdpo(ROWS, UIDS), abs=1e-6)
    named = trainer.train(given, "+algorithm.gdpo.rewards={format: 1.0, num_turns: 0.5}")
    rows = [[row[2], 2 * (number % 4)] for number, row in enumerate(ROWS)]
    expected = oracle.gdpo(rows, UIDS, weights=[1, 0.5])
    assert [*named.values()] == pytest.approx(expected, abs=1e-6)


NO_NAMES = (
    r"the agent loop set reward_score=1 itself, so no reward manager ran, and "
    r'extra_fields\["reward_extra_info"\], which takes {name: reward}, holds '
)
NAMES = "+algorithm.gdpo.rewards={correctness: 1.0, format: 1.0}"


@pytest.mark.parametrize(
    ("info", "overrides", "reason"),
    [
        (NOT_SET, [], NO_NAMES + "no named reward"),
        ({}, [], NO_NAMES + "no named reward"),
        ({"num_turns": 4, "score": 1.0}, [], NO_NAMES + "no named reward"),
        ({"num_turns": 4}, [], NO_NAMES + "no named reward"),
        (NOT_SET, [NAMES], "reward 'correctness' is configured, but " + NO_NAMES + r"\[\]"),
        ({"correctness": 1.0, "formt": 0.0}, [NAMES], r"'formt'\]; did you mean 'formt'\?"),
        ({"correctness": math.nan}, [], "reward 'correctness' is nan; expected a finite number"),
        (
            {"a": 1.0, "b": 1.0},
            [],
            r"set reward_score=1, which is not the sum of {'a': 1.0, 'b': 1",
        ),
        ({"a": 1.0, "reward": 1.0}, [], "reward_extra_info has the name 'reward': it is a metric"),
    ],
)
def test_an_agent_loop_that_returns_something_else_is_told_what(trainer, info, overrides, reason):
    given = {"p": [(1.0, info)] * 2}
    with pytest.raises(RewardError, match=reason) as error:
        trainer.train(given, *overrides)
    assert "the scorer returned" not in str(error.value)


def test_the_score_of_an_agent_loop_has_to_be_finite(trainer):
    with pytest.raises(RewardError, match="'reward_score' is nan; expected a finite number"):
        trainer.train({"p": [(math.nan, {"correctness": 1.0, "format": 1.0})] * 2}, NAMES)


def test_a_grpo_baseline_trains_on_the_sum_that_is_configured(trainer):
    grpo = ["algorithm.adv_estimator=grpo", "+algorithm.gdpo.rewards={a: 1.0, b: 0.5}"]
    table = {"p": [{"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 1.0}]}
    with pytest.raises(RewardError, match=r"set reward_score=2, on which any.*gdpo.rewards is 1.5"):
        trainer.train(scored(table), *grpo)
    infos = [info for _, info in scored(table)["p"]]
    advantages = trainer.train({"p": [*zip([1.5, 0.5], infos, strict=True)]}, *grpo)
    assert [*advantages.values()] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


# --- names ---------------------------------------------------------------------------------------

# other columns of verl's batches and dumps, of our dumps, words of verl's validation, odd text
NAMES_THAT_WORK = [
    *("summary", "index", "raw_prompt", "extra_info", "request_id", "priority", "turn_scores"),
    *("prompts", "rm_scores", "agent_name", "group", "session", "advantage", "rewards", "sum"),
    *("is_padding", "response_tokens", "trained_tokens", "acc", "pred", "length_correlation"),
    *("reward_score", "mean@2", "a b", "a.b", "größe", "奖励", "x" * 300),
]


def test_names_that_work(trainer):
    """Each name has values of its own; every place has to show those."""
    names = [*NAMES_THAT_WORK, "other"]
    values = np.random.default_rng(0).integers(0, 9, (4, len(names))).astype(float)
    rows = [dict(zip(names, row, strict=True)) for row in values.tolist()]
    given = scored({"p": rows[:2], "q": rows[2:]})
    advantages = trainer.train(given)
    expected = oracle.gdpo(values.tolist(), ["p", "p", "q", "q"])
    assert [*advantages.values()] == pytest.approx(expected, abs=1e-6)
    for name, mean in zip(names, values.mean(axis=0), strict=True):
        assert trainer.metrics[f"gdpo/{name}/mean"] == mean
    metrics, dump = trainer.validated(given)
    sums = values.sum(axis=1)
    for name, mean in zip([*names, "reward"], [*values.mean(axis=0), sums.mean()], strict=True):
        kind = "core" if name == "acc" else "aux"  # as verl does
        assert metrics[f"val-{kind}/d/{name}/mean@2"] == pytest.approx(mean)
    for lines in (dump, trainer.dumped()):
        assert sorted(line["score"] for line in lines) == pytest.approx(sorted(sums))
        for line in lines:
            row = rows[sums.tolist().index(line["score"])]
            assert {name: line[name] for name in names} == row
            assert line["step"] == 7


@pytest.mark.parametrize(
    "name",
    [
        *RESERVED_NAMES,
        "gdpo_rubric_a",
        *("", " ", "a/b", "a\nb", "\ud800", 7, 1.5, True, None, (1, 2)),
    ],
)
def test_other_names_are_refused(trainer, name):
    refusal = pytest.raises(RewardError, match=r"^p(_0_0)?: reward_extra_info has the name")
    if name in OF_AGENT_LOOPS:  # which we add ourselves
        # V1 logs why, and has no prompt left
        refusal = pytest.raises((ValueError, RolloutError), match=rf"{name}|_run_prompt")
    with refusal:
        trainer.train({"p": [(1.0, {"a": 1.0, name: 0.0})] * 2}, "+algorithm.gdpo.rewards.a=1.0")


# --- rows that differ ----------------------------------------------------------------------------


def test_rows_of_one_data_source_need_the_same_rewards(trainer):
    table = {"p": [{"a": 1.0, "b": 1.0}, {"a": 0.0}]}
    with pytest.raises(RewardError, match=r"no reward 'b'; the agent loop set reward_score=0"):
        trainer.train(scored(table), "+algorithm.gdpo.rewards={a: 1.0, b: 1.0}")


def test_what_is_only_logged_may_differ(trainer):
    """Lists of different length, and keys that only some rows have, in training and validation."""
    logged = [{"parts": [1]}, {"parts": [1, 2], "note": "x"}, {"late": 5.0}, {}]
    rows = [{"a": float(n), "b": 1.0 - n % 2} for n in range(4)]
    sets = [(sum(r.values()), {**r, **extra}) for r, extra in zip(rows, logged, strict=True)]
    given = {"p": sets[:2], "q": sets[2:]}
    named = "+algorithm.gdpo.rewards={a: 1.0, b: 1.0}"
    advantages = trainer.train(given, named)
    expected = oracle.gdpo([[*row.values()] for row in rows], [*"ppqq"])
    assert [*advantages.values()] == pytest.approx(expected, abs=1e-6)
    metrics, dump = trainer.validated(given)
    assert metrics["val-aux/d/a/mean@2"] == 1.5
    assert metrics["val-aux/d/late/mean@1"] == 5.0
    assert not [name for name in metrics if "/parts/" in name or "/note/" in name]
    assert not [name for name in metrics if AGENT_SCORE_KEY in name]
    for lines in (dump, trainer.dumped()):
        assert not [line for line in lines if AGENT_SCORE_KEY in str(line)]
        assert sorted(str(line.get("parts")) for line in lines) == ["None", "None", "[1, 2]", "[1]"]
        assert {line.get("note") for line in lines} == {None, "x"}


def test_a_worker_asks_once_whether_its_run_has_gdpo(workers, monkeypatch):
    """verl may run the file of the user's manager for the answer."""
    asked = []
    monkeypatch.setattr(agent_loop, "runs_gdpo_manager", lambda config: asked.append(config))
    worker = SimpleNamespace(config=OmegaConf.create({"reward": {}}))  # without `algorithm`
    assert [agent_loop._is_for_us(worker) for _ in range(3)] == [False] * 3
    assert asked == [worker.config]


def test_a_reward_function_knows_whether_this_is_validation():
    """Sessions run side by side; what verl's `_compute_score` sees is no column afterwards."""
    worker = SimpleNamespace(config=OmegaConf.create({"algorithm": {"adv_estimator": "gdpo"}}))

    async def compute(self, outputs, kwargs):
        await asyncio.sleep(0)
        seen.append((len(outputs[-1].response_ids), dict(outputs[-1].extra_fields)))

    async def session(self, sampling_params, trajectory, number):
        output = made_output(number)
        output.metrics.tool_calls = 0.5
        await stand_in(agent_loop.compute_and_mark, compute)(self, [output], {})
        assert not {"is_validation", "tool_seconds"} & output.extra_fields.keys()

    async def both():
        run = functools.partial(stand_in(agent_loop.run_and_note, session), worker, {})
        await asyncio.gather(*(run({"validate": bool(number)}, number=number) for number in (0, 1)))

    seen = []
    asyncio.run(both())
    facts = {length: (of["is_validation"], of["tool_seconds"]) for length, of in seen}
    assert facts == {2: (False, 0.5), 3: (True, 0.5)}


@pytest.mark.parametrize("own_score", [None, 2.0])
def test_what_a_rollout_took_goes_to_the_trainer(own_score):
    """Of a session of two outputs: the seconds of both, and the tokens of the scored one."""
    worker = SimpleNamespace(config=OmegaConf.create({"algorithm": {"adv_estimator": "gdpo"}}))

    async def compute(self, outputs, kwargs):
        if own_score is None:
            outputs[-1].extra_fields[agent_loop.INFO] = {"a": 1.0}

    async def session(self, sampling_params, trajectory):
        outputs = [made_output(0), made_output(3)]
        for output in outputs:
            output.metrics.tool_calls = 0.5
        outputs[-1].response_mask = [1, 1, 0, 0, 1]
        outputs[-1].reward_score = own_score
        if own_score is not None:
            outputs[-1].extra_fields[agent_loop.INFO] = {"a": 1.0}
        await stand_in(agent_loop.compute_and_mark, compute)(self, outputs, {})
        return outputs[-1].extra_fields[agent_loop.INFO]

    def info(validate):
        run = stand_in(agent_loop.run_and_note, session)
        return asyncio.run(run(worker, {}, {"validate": validate}))

    rollout = {"generated_tokens": 3, "tool_seconds": 1.0}
    of_loop = {} if own_score is None else {AGENT_SCORE_KEY: own_score}
    assert info(False) == {"a": 1.0, **of_loop, ROLLOUT_KEY: rollout}
    assert info(True) == {"a": 1.0, **of_loop}


def test_what_is_scored_later_has_no_rollout_yet():
    """A colocated reward model scores in the trainer, so there is nothing to write beside."""
    worker = SimpleNamespace(config=OmegaConf.create({"algorithm": {"adv_estimator": "gdpo"}}))

    async def compute(self, outputs, kwargs):
        pass

    output = made_output(0)
    asyncio.run(stand_in(agent_loop.compute_and_mark, compute)(worker, [output], {}))
    assert output.extra_fields == {}


# --- functions that compare a group --------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_sessions_wait_for_those_that_neither_failed_nor_were_cancelled(fails):
    """No session waits for one that has ended, and all get what the one call brought."""
    config = {"algorithm": {"adv_estimator": "gdpo"}, "reward": {"reward_functions": {}}}
    config["reward"]["reward_functions"] = {"rank": {"path": "a.py", "group": True}}
    worker = SimpleNamespace(config=OmegaConf.create(config))

    async def compute(self, outputs, kwargs):
        calls.append([len(each.response_ids) for each in outputs])
        if fails:
            raise OSError("the reward worker is gone")
        results = [{"reward_score": float(n), agent_loop.INFO: {"rank": n}} for n in calls[0]]
        outputs[-1].reward_score, outputs[-1].extra_fields[agent_loop.INFO] = 0.0, results

    async def session(number):
        for _ in range(9 if number == 0 else 0):  # the others wait
            await asyncio.sleep(0)
        if number == 0:
            tasks[4].cancel()
        if number == 1:
            raise RuntimeError("the server is gone")
        output = made_output(number)
        mark = stand_in(agent_loop.compute_and_mark, compute)
        await mark(worker, [output], {"session_id": number})
        return output.reward_score, output.extra_fields[agent_loop.INFO]["rank"]

    async def prompt():
        tasks.extend(asyncio.create_task(session(number)) for number in range(5))
        errors = await agent_loop_tq._settle_session_tasks(tasks)
        own = [task.cancelled() or task.exception() or task.result() for task in tasks]
        return [type(error) for error in errors], [own[0], *own[2:]]

    calls, tasks = [], []
    errors, own = asyncio.run(prompt())
    assert not agent_loop._groups  # else all outputs of a run would stay in memory
    assert calls == [[2, 4, 5, 6]]  # tokens, in the order of the sessions
    if fails:
        assert errors == [OSError, RuntimeError, OSError, OSError, asyncio.CancelledError]
    else:
        assert errors == [RuntimeError, asyncio.CancelledError]
        assert own == [(2.0, 2), (4.0, 4), (5.0, 5), True]
