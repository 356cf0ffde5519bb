"""`on_error: drop`: a sample that leaves all statistics and the loss, in verl's V1 trainer."""

from types import SimpleNamespace

import pytest
import torch
from stand_in import stand_in
from v1_step import dump, ours, step_of
from verl.trainer.ppo.core_algos import agg_loss
from verl_batch import verl_config

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import DROPPED, NOTES_KEY, RewardError
from verl_gdpo.hooks import legacy
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.hooks.extend import attach, record_of
from verl_gdpo.hooks.trainer import update_validation_metrics
from verl_gdpo.tools.run_folder.dump_reader import read_dump, reward_rows

ENTRY = "+reward.reward_functions.judge={path: a.py, on_error: drop}"
LIMIT = "++algorithm.gdpo.max_failed"


def infos_of(values, failed=()):
    return [
        {"a": a, "judge": None if n in failed else b, "score": a + (0 if n in failed else b)}
        | {NOTES_KEY: {"failed_judge": float(n in failed), DROPPED: float(n in failed)}}
        for n, (a, b) in enumerate(values)
    ]


# u_1 and w_0 fail; one sample of w is no group, and x is whole
VALUES = {
    "u": [(0.0, 0.0), (9.0, 0.0), (1.0, 0.5), (2.0, 0.5)],
    "w": [(7.0, 1.0), (-7.0, 1.0)],
    "x": [(0.0, 1.0), (1.0, 0.5), (1.0, 1.0)],
}
FAILED = {"u": [1], "w": [0]}
LEFT = ["u_0_0", "u_2_0", "u_3_0", "x_0_0", "x_1_0", "x_2_0"]


def trained(queue, folder, *overrides, left_alone=False):
    """A step on `VALUES`, in which u_1 has two rows; `left_alone`: on the samples that are left."""
    for uid, values in VALUES.items():
        queue.add_group(uid, infos_of(values, FAILED.get(uid, ())), range(2, 2 + len(values)))
    queue.rows["u_1_1"], queue.tags["u_1_1"] = {**queue.rows["u_1_0"]}, queue.tags["u_1_0"]
    if left_alone:
        queue.kv_clear(["w", *(key for key in queue.rows if key not in LEFT)], "train")
    trainer = ours(folder, ENTRY, f"{LIMIT}=1", *overrides)
    return trainer, *step_of(trainer, len(VALUES) - left_alone)


# gpg counts the rows of the batch, and grpo_passk refuses a row that is a group of its own
@pytest.mark.parametrize("estimator", ["gdpo", "grpo", "rloo", "gpg", "grpo_passk"])
def test_a_dropped_sample_is_as_if_it_were_not_there(queue, tmp_path, estimator):
    overrides = [f"algorithm.adv_estimator={estimator}"]
    trainer, batch, metrics = trained(queue, tmp_path, *overrides)
    rows = {key: dict(row) for key, row in queue.rows.items()}
    assert metrics["gdpo/scoring/failed_judge"] == 2 / 9
    assert metrics["gdpo/scoring/dropped"] == 3 / 9  # with the sample that is left of w
    dumped = read_dump(dump(trainer, batch))
    counted = reward_rows(dumped, 7).counted_B
    assert {row["uid"] for row, is_in in zip(dumped, counted, strict=True) if is_in} == {*LEFT}
    _, alone, metrics_alone = trained(queue, tmp_path, *overrides, left_alone=True)
    assert sorted(alone.keys) == LEFT and len(batch.keys) == 10
    for key in batch.keys:
        advantages, mask = rows[key]["advantages"], rows[key]["response_mask"]
        if key in LEFT:
            assert torch.equal(advantages, queue.rows[key]["advantages"])
            assert mask.all() and "loss_mask" not in rows[key]
        else:
            assert not advantages.any() and not mask.any() and not rows[key]["loss_mask"].any()
    same = [name for name in metrics_alone if "scoring" not in name]
    assert {k: metrics[k] for k in same} == pytest.approx({k: metrics_alone[k] for k in same})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{LIMIT}=0.3"], "dropped: 33% of the samples of step 7, and algorithm.gdpo.max_failed"),
        ([f"{LIMIT}=0.2"], "failed judge: 22% of the samples of step 7"),
        (["+algorithm.gdpo.min_group=4"], "no sample, only padding and what on_error=drop took"),
    ],
)
def test_too_many_dropped_samples_end_the_run(queue, tmp_path, monkeypatch, overrides, message):
    monkeypatch.setitem(FAILED, "x", [0] if "min_group" in overrides[0] else [])
    with pytest.raises(RewardError, match=message):
        trained(queue, tmp_path, *overrides)


SEQ = "seq-mean-token"


# verl's FSDP passes the tokens of the loss masks of a mini-batch, and the samples of its settings
@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", f"{SEQ}-sum", f"{SEQ}-sum-norm", f"{SEQ}-mean"]
)
def test_what_a_dropped_row_does_to_each_loss(mode):
    loss, mask = torch.tensor([[1.0, 2.0], [50.0, 70.0], [4.0, 8.0]]), torch.ones(3, 2)
    mask[1], of = 0, {"loss_agg_mode": mode, "loss_scale_factor": 2}
    absent = agg_loss(loss[::2], mask[::2], **of, batch_num_tokens=4, global_batch_size=2)
    dropped = agg_loss(loss, mask, **of, batch_num_tokens=int(mask.sum()), global_batch_size=3)
    # a mean over sequences still divides by the samples that the mini-batch was to have
    assert dropped == pytest.approx(absent.item() * (2 / 3 if SEQ in mode else 1))
    empty = agg_loss(loss, mask * 0, **of, batch_num_tokens=0, global_batch_size=3)
    assert empty.isnan() if mode == "token-mean" else empty == 0


def test_dynamic_sampling_looks_at_what_is_left(queue, tmp_path):
    same, other = (0.0, 0.5), (1.0, 0.5)
    groups = {"equal": [same, same, other], "varies": [same, other, other], "one": [same, other]}
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]
    buffer = ours(tmp_path, ENTRY, f"{LIMIT}=0.5", *filtering).replay_buffer
    assert record_of(buffer).samples == 8  # of a batch
    for uid, values in groups.items():
        queue.add_group(uid, infos_of(values, [len(values) - 1]), [2] * len(values))
    buffer._sync_metadata_from_transfer_queue()
    assert buffer._dapo_filtered_keys("train")[0] == {"equal", "one"}
    # they would be filtered and replaced for ever
    for uid in ("r", "s"):
        queue.add_group(uid, infos_of([same, other], [0, 1]), [2, 2])
    buffer._sync_metadata_from_transfer_queue()
    with pytest.raises(RewardError, match=r"failed judge: 58% of the samples that dynamic samp"):
        buffer._dapo_filtered_keys("train")


def test_the_mean_to_keep_groups_by_is_that_of_what_is_left(queue, tmp_path):
    """Each group has a sample whose function failed, with the value 9 of `a`."""
    groups = {"low": [0.0, 0.2, 0.1], "high": [0.7, 0.8, 0.9], "one": [0.5]}
    overrides = [
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        "++algorithm.gdpo.keep_groups={a: [0.5, 1.0]}",
    ]
    buffer = ours(tmp_path, ENTRY, f"{LIMIT}=0.6", *overrides).replay_buffer
    for uid, values in groups.items():
        pairs = [(a, 0.5) for a in (*values, 9.0)]
        queue.add_group(uid, infos_of(pairs, [len(values)]), [2] * len(pairs))
    buffer._sync_metadata_from_transfer_queue()
    assert buffer._dapo_filtered_keys("train")[0] == {"low", "one"}
    batch, metrics = buffer.sample(7, "train", 1)
    assert {key.split("_")[0] for key in batch.keys} == {"high"}
    assert metrics["gdpo/filter_kept"] == 1 / 3
    assert metrics["gdpo/a/groups_outside"] == 1 / 3


def test_validation_leaves_out_dropped_samples():
    infos = {"reward": [1.0, 0.0], "judge": [1.0, None], "acc": [1.0, 0.0]}
    infos[NOTES_KEY] = [infos_of([(1.0, 0.0)] * 2, [1])[n][NOTES_KEY] for n in (0, 1)]
    expected = {"reward": [1.0, None], "judge": [1.0, None], "acc": [1.0, None]}
    counts = {"expected_acc_counts": {("s", "u"): 2}}

    def verls(self, data_sources, sample_uids, reward_extra_infos_dict, **counts):
        return reward_extra_infos_dict, counts

    update = stand_in(update_validation_metrics, verls)
    result = update(trainer_with(GdpoSettings(max_failed=0.5)), "ss", "uu", infos, **counts)
    assert result == (expected, {"expected_acc_counts": {("s", "u"): 1}})


def test_a_validation_without_a_judge_is_no_low_score():
    """The sum of a sample lacks what the judge would have given."""
    notes = [{"failed_judge": 1.0}, {"failed_judge": 0.0}]
    infos = {"reward": [1.0, 1.8], "judge": [None, 0.8], "score": [1.0, 1.8], NOTES_KEY: notes}

    def verls(self, data_sources, sample_uids, reward_extra_infos_dict):
        return reward_extra_infos_dict

    update = stand_in(update_validation_metrics, verls)
    result = update(trainer_with(GdpoSettings(max_failed=0.5)), "ss", "uu", infos)
    assert result == {"reward": [None, 1.8], "judge": [None, 0.8], "score": [None, 1.8]}
    with pytest.raises(RewardError, match="failed judge: 50% of the samples of a validation"):
        update(trainer_with(GdpoSettings()), "ss", "uu", infos)


def trainer_with(settings):
    trainer = SimpleNamespace()
    attach(trainer, SimpleNamespace(settings=settings))
    return trainer


def test_where_samples_cannot_be_dropped():
    config = verl_config(
        ENTRY, "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True"
    )
    with pytest.raises(ValueError, match=r"judge.on_error=drop: verl filters groups by all scores"):
        settings_of_run(config)
    trainer = SimpleNamespace(config=verl_config(ENTRY))
    with pytest.raises(ValueError, match=r"judge.on_error=drop: only the V1 trainers"):
        stand_in(legacy.create_dataloader, lambda self: None)(trainer)
