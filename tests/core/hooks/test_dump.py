"""What a step of verl's V1 trainer reads from TransferQueue, and what its dumps hold.

verl's own constructors, replay buffer, `_compute_advantage`, `_log_rollout_data` and `_validate`
run. TransferQueue, the tokenizer and the agent loops are doubles.
"""

import json
from collections import Counter
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from v1_step import A_OF, dump, fill, make_trainer, ours, sample_and_train, step_of
from verl import DataProto
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_gdpo.algorithm import metrics as metrics_module
from verl_gdpo.algorithm.matrix import scalars_of
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import NOTES_KEY, RESPONSE_KEY, ROLLOUT_KEY
from verl_gdpo.hooks import estimator as estimator_module
from verl_gdpo.hooks.advantage_step import AdvantageStep, TokenAdvantages
from verl_gdpo.hooks.dump import DumpRows
from verl_gdpo.hooks.extend import record_of
from verl_gdpo.tools.run_folder.dump_reader import read_dump

VERLS_OWN = ["algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive"]
FILTER = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"]


def read_strictly(path):
    """Rows of a file in which NaN and Infinity are errors, as they are to other JSON readers."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_a_step_reads_what_verls_own_reads(queue, tmp_path):
    reads = []
    for trainer in (
        make_trainer(PPOTrainerSync, tmp_path / "verls", *VERLS_OWN, *FILTER),
        ours(tmp_path / "ours", *FILTER),
    ):
        queue.reads.clear()
        prompts = fill(queue, copies=2)
        dump(trainer, sample_and_train(trainer, len(prompts)))
        reads.append(Counter(queue.reads))
    verls, of_ours = reads
    assert of_ours - verls == {("data_source", 8): 1}
    assert verls - of_ours == {}


class WithSuper(PPOTrainerSync):
    """As users write them: ours is around this method, and verl's is called by it."""

    def _compute_advantage(self, batch, metrics):
        metrics["mine"] = 1.0
        return super()._compute_advantage(batch, metrics)


class WithoutSuper(WithSuper):
    def _compute_advantage(self, batch, metrics):
        uids = np.array([key[0] for key in batch.keys], dtype=object)
        names = ("response_mask", "token_level_rewards")
        data = DataProto.from_single_dict({n: torch.ones(4, 2) for n in names} | {"uid": uids})
        compute_advantage_for_multi_trajectories(data, batch.keys, "gdpo", config={})
        metrics["mine"] = 2.0
        return batch


COLOCATED = ["trainer.v1.trainer_mode=colocate_async"]


def test_trainers_of_one_process_do_not_touch_each_other(queue, tmp_path):
    """gdpo, grpo, gdpo; a synchronous buffer, and then an asynchronous one."""
    kinds = [
        ours(tmp_path),
        make_trainer(PPOTrainerSync, tmp_path, *VERLS_OWN),
        make_trainer(WithSuper, tmp_path),
        make_trainer(WithSuper, tmp_path, *VERLS_OWN),
        make_trainer(PPOTrainerColocateAsync, tmp_path, *COLOCATED),
        make_trainer(PPOTrainerColocateAsync, tmp_path, *COLOCATED, *VERLS_OWN),
        make_trainer(WithoutSuper, tmp_path),
    ]
    assert [type(trainer.replay_buffer).__name__ for trainer in kinds] == [
        *["ReplayBuffer"] * 4,
        *["ReplayBufferAsync"] * 2,
        "ReplayBuffer",
    ]
    for trainer in (*kinds, *kinds):
        queue.rows.clear()
        fill(queue)
        _, metrics = step_of(trainer)
        is_ours = trainer.config.algorithm.adv_estimator == "gdpo"
        assert ("gdpo/a/mean" in metrics) == is_ours
        assert ("mine" in metrics) == isinstance(trainer, WithSuper)
        record = record_of(trainer)
        assert (record is not None) == is_ours
        if record:  # once a call: a step has as many batches as calls
            trainer.global_steps += 1
            assert set(record.dump_rows.columns(list(A_OF))["batch"]) == {0}


def test_without_filter_groups_the_rewards_are_read_once(queue, tmp_path):
    trainer = ours(tmp_path)
    dump(trainer, sample_and_train(trainer, len(fill(queue))))
    assert queue.reads["extra_fields", 4] == 1
    assert not record_of(trainer.replay_buffer).known_rows  # the next step has other rows


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_the_metrics_reuse_the_scalars_of_the_estimator(queue, tmp_path, monkeypatch, estimator):
    """verl's grpo has none, so its metrics compute them."""
    count = Counter()
    for module in (estimator_module, metrics_module):
        monkeypatch.setattr(
            module, "scalars_of", lambda *given: count.update(["scalars"]) or scalars_of(*given)
        )
    trainer = ours(tmp_path, f"algorithm.adv_estimator={estimator}")
    fill(queue)
    _, metrics = step_of(trainer)
    assert count["scalars"] == 1
    assert metrics["gdpo/a/share"] == pytest.approx(0.25 if estimator == "grpo" else 0.4)


def test_data_sources_that_only_the_batches_tell(queue, tmp_path):
    """With a reward function of the user, nobody has looked at the data sources before."""
    trainer, told = ours(tmp_path), []
    for number, source in enumerate(["d", "e", "d"]):
        info = {"a": float(number), "score": float(number)}
        queue.add_group(f"u{number}", [info, info], lengths=(2, 3), data_source=source)
        _, metrics = step_of(trainer, 1)
        told.append({name for name in metrics if name.startswith("gdpo/a/mean/")})
    # a curve of a source must not end because one step has no other source
    assert told == [set(), {"gdpo/a/mean/e"}, {"gdpo/a/mean/d"}]


def add_batch(kept, uid, step):
    """A row with a note of its scorer, and a row of padding."""
    infos = [{"a": 1.0, "score": 1.0, NOTES_KEY: {"seconds": 0.5}}] * 2
    keys = [f"{uid}_0_0", f"pad{uid}_1_0"]
    rows = BatchRows.from_keys(keys, infos, ["d"] * 2, [False, True], step=step)
    advantages = TokenAdvantages(np.array([3, 0]), np.array([0.5, 0.0]))
    kept.add([4, 0], AdvantageStep(GdpoSettings(), rows, advantages=advantages))


def test_a_dump_keeps_the_batches_of_a_step():
    kept = DumpRows()
    assert kept.columns([]) == {}
    for uid in "uvw":
        add_batch(kept, uid, step=7)
    columns = kept.columns(["w_0_0", "v_0_0", "u_0_0", "padw_1_0"])
    assert columns["batch"] == [2, 1, 0, 2]
    assert columns["is_padding"] == [False, False, False, True]
    # verl writes the score, and notes are averaged for the metrics
    assert columns["rewards"][0] == {"a": 1.0} and columns["advantage"][3] == 0.0
    add_batch(kept, "x", step=8)
    assert kept.columns(["x_0_0"])["batch"] == [0]
    with pytest.raises(RuntimeError, match=r"1 of 1 rows were in no batch .* such as w_0_0"):
        kept.columns(["w_0_0"])


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_dump_does_no_tensor_operation_of_its_own(queue, tmp_path):
    # indexing a jagged tensor by row unbinds all rows each time: 4,096 rows took minutes
    counts = []
    for trainer in (
        make_trainer(PPOTrainerSync, tmp_path / "verls", *VERLS_OWN),
        ours(tmp_path / "ours"),
    ):
        batch = sample_and_train(trainer, len(fill(queue, copies=4)))
        with Operations() as operations:
            dump(trainer, batch)
        counts.append(operations.counts)
    assert counts[0] == counts[1]
    assert counts[0].total() > 0


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_the_rows_of_a_dump(queue, tmp_path, estimator):
    fill(queue)
    # the middle token of the second row of u is a tool's; no token of the first of v is trained
    queue.rows["u_1_0"]["response_mask"] = torch.tensor([1, 0, 1])
    queue.rows["v_0_0"]["response_mask"] = torch.tensor([0, 0])
    # The first row of u was not scored as verl decodes it.
    scored = {"turns": [["<think>", "x" * 20_000]], "generated_tokens": 2}
    queue.rows["u_0_0"]["extra_fields"]["reward_extra_info"][RESPONSE_KEY] = scored
    # All but one came from our agent loop workers, and one has waited for a tool.
    rollouts = {"u_0_0": (2, 0.0), "u_1_0": (2, 1.5), "v_0_0": (2, 0.5)}
    for key, (tokens, seconds) in rollouts.items():
        info = queue.rows[key]["extra_fields"]["reward_extra_info"]
        info[ROLLOUT_KEY] = {"generated_tokens": tokens, "tool_seconds": seconds}
    del queue.rows["v_1_0"]["extra_fields"]["reward_extra_info"][ROLLOUT_KEY]
    trainer = ours(tmp_path, f"algorithm.adv_estimator={estimator}")
    batch, metrics = step_of(trainer, 2)
    rows = read_dump(dump(trainer, batch))
    of_rows = [(row["generated_tokens"], row["tool_seconds"]) for row in rows]
    assert of_rows == [*rollouts.values(), (None, None)]
    assert metrics["gdpo/rollout/generated_tokens/mean"] == 2.0
    assert metrics["gdpo/rollout/tool_seconds/mean"] == pytest.approx(2 / 3)
    assert metrics["gdpo/rollout/tool_seconds/max"] == 1.5
    assert [row["as_scored"] for row in rows] == [scored, None, None, None]
    assert [(r["uid"], r["response_tokens"], r["trained_tokens"]) for r in rows] == [
        ("u_0_0", 2, 2),
        ("u_1_0", 3, 2),
        ("v_0_0", 2, 0),
        ("v_1_0", 3, 3),
    ]
    half = 0.5**0.5  # in GRPO both groups are -+ .7071
    A = A_OF if estimator == "gdpo" else dict(zip(A_OF, [-half, half, -half, half], strict=True))
    expected = {**A, "v_0_0": 0.0}  # where nothing is trained
    assert {row["uid"]: row["advantage"] for row in rows} == pytest.approx(expected, abs=1e-4)
    assert rows[1]["rewards"] == {"a": 0.0, "b": 1.0}
    assert (rows[3]["group"], rows[3]["session"], rows[3]["data_source"]) == ("v", 1, "d")


def test_the_metrics_of_token_batch_norm_count_the_tokens_that_are_trained(queue, tmp_path):
    """Rollout correction rejects tokens after the lengths of the responses are known."""
    fill(queue)
    queue.rows["u_1_0"]["response_mask"] = torch.tensor([1, 0, 0])
    trainer = ours(tmp_path, "+algorithm.gdpo.batch_norm=token", "+algorithm.gdpo.eps=0")
    _, metrics = step_of(trainer)
    # z of a and b: u 0 and -+ .7071, v -+ .7071 each; tokens 2 1 2 3
    S, tokens = np.array([-1, 1, -2, 2]) * 0.5**0.5, np.array([2, 1, 2, 3])
    mean = (S * tokens).sum() / 8
    std = np.sqrt(((S - mean) ** 2 * tokens).sum() / 7)
    assert metrics["gdpo/batch_norm_mean"] == pytest.approx(mean)
    assert metrics["gdpo/batch_norm_std"] == pytest.approx(std)


@pytest.mark.parametrize(
    ("tokens", "seconds", "are_there"),
    [((2, 3), (0.0, 0.0), False), ((2, 2), (0.0, 0.0), True), ((2, 3), (0.0, 0.1), True)],
)
def test_a_run_without_tools_has_no_metrics_of_them(queue, tmp_path, tokens, seconds, are_there):
    """The responses have 2 and 3 tokens."""
    fill(queue)
    for key, row in queue.rows.items():
        if key in ("u", "v"):
            continue
        place = int(key.split("_")[1])
        info = row["extra_fields"]["reward_extra_info"]
        info[ROLLOUT_KEY] = {"generated_tokens": tokens[place], "tool_seconds": seconds[place]}
    _, metrics = step_of(ours(tmp_path))
    assert ("gdpo/rollout/tool_seconds/max" in metrics) is are_there
    assert not [name for name in metrics if ROLLOUT_KEY in name]


def test_a_sample_that_rollout_correction_rejects_stays_in_its_group(queue, tmp_path):
    """On purpose, as in verl's grpo: rejection judges the probabilities, and not the reward."""
    advantages = {}
    for mode in ("rejects", "keeps"):
        infos = [{"a": a, "score": a} for a in (100.0, 1.0, 1.0, 0.0)]
        queue.add_group("u", infos, [2] * 4)
        for key in list(queue.rows):
            ratio = 0.5 if key == "u_0_0" and mode == "rejects" else 0.0
            queue.rows[key]["old_log_probs"] = torch.full((2,), -1.0 + ratio)
            queue.rows[key]["rollout_log_probs"] = torch.full((2,), -1.0)
        correction = "algorithm.rollout_correction"
        trainer = ours(
            tmp_path,
            f"{correction}.rollout_rs=seq_mean_k1",
            f"{correction}.rollout_rs_threshold='0.98_1.02'",
            "+algorithm.gdpo.batch_norm=none",
        )
        batch, metrics = step_of(trainer, 1)
        share = 0.25 if mode == "rejects" else 0.0
        assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == share
        rows = [queue.rows[key] for key in batch.keys]
        trained = [bool(row["response_mask"].any()) for row in rows]
        assert trained == [mode == "keeps", True, True, True]
        advantages[mode] = [float(row["advantages"][0]) for row in rows]
    of_all = oracle.gdpo([[100.0], [1.0], [1.0], [0.0]], ["u"] * 4, batch_norm="none")
    assert advantages["keeps"] == pytest.approx(of_all, abs=1e-6)
    # its own tokens are not trained, and its siblings have the same advantages as before
    assert advantages["rejects"] == pytest.approx([0.0, *of_all[1:]], abs=1e-6)


ODD = {
    "tests": {1},
    "raw": b"\xff",
    "vector": np.arange(2),
    "tensor": torch.ones(2),
    "exact": Decimal("0.5"),
    "ratio": np.float32(0.25),
    "unknown": float("nan"),
    "by_case": {(1, 2): 3},
    "answer": "four",
    "mixed": None,
    "cut": "x" * 20_000,
}
NAMED = ["+algorithm.gdpo.rewards.a=1.0", "+algorithm.gdpo.rewards.b=1.0"]


def validate(queue, trainer, more=lambda prompt, sample: {}):
    """verl's own `_validate` on two prompts of two samples."""
    prompts = {"raw_prompt": np.array(["p", "q"], dtype=object)}
    trainer.val_dataloader = [{**prompts, "data_source": np.array(["d", "d"], dtype=object)}]
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])

    def generate_sequences(batch):
        for number, uid in enumerate(batch["uid"]):
            infos = [
                {"a": float(number), "b": 1.0, "score": 1.0, **ODD, "mixed": mixed}
                | more(number, sample)
                for sample, mixed in enumerate((1.0, "one"))
            ]
            queue.add_group(uid, infos, lengths=(2, 3), partition="val")

    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=generate_sequences)
    metrics = trainer._validate()
    trainer._shutdown_dump_executor()
    return metrics


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the NaN
def test_validation_survives_what_json_cannot_hold(queue, tmp_path):
    metrics = validate(queue, ours(tmp_path, *NAMED, "actor_rollout_ref.rollout.val_kwargs.n=2"))
    assert metrics["val-aux/d/a/mean@2"] == 0.5
    assert metrics["val-aux/d/exact/mean@2"] == 0.5
    # as verl does with text, there is no metric of what is no number
    assert not [name for name in metrics if "/tests/" in name or "/mixed/" in name]
    rows = read_strictly(tmp_path / "7.jsonl")
    assert [row["mixed"] for row in rows] == [1.0, "one"] * 2
    assert rows[0]["raw"] == r"b'\xff'" and rows[0]["answer"] == "four"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_accuracy_that_does_not_apply_is_no_0(queue, tmp_path):
    """verl counts a session that failed as 0, and takes a None for one."""
    trainer = ours(tmp_path, *NAMED, "actor_rollout_ref.rollout.val_kwargs.n=2")
    metrics = validate(queue, trainer, lambda prompt, sample: {"acc": None if prompt else 1.0})
    assert metrics["val-core/d/acc/mean@2"] == 1.0


def test_plain_verl_does_not(queue, tmp_path):
    """When it does, our own handling of validation can go."""
    with pytest.raises(TypeError):
        validate(queue, make_trainer(PPOTrainerSync, tmp_path, *VERLS_OWN))
