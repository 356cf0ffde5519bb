"""What is said of a `format` that is 0 for all samples of its first step."""

import logging
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from run_config import listed, run_config
from stand_in import stand_in
from v1_step import ours, step_of
from verl.trainer.ppo import ray_trainer
from verl_batch import GROUPS, batch, verl_config

from verl_gdpo.algorithm.rows import BatchRows, RowKey
from verl_gdpo.hooks import legacy
from verl_gdpo.hooks.extend import record_of
from verl_gdpo.hooks.first_step import FirstFormats

ZERO, ONE = {"format": 0.0, "correctness": -3.0}, {"format": 1.0, "correctness": 3.0}


def rows_of(*infos, sources=None, is_padding=None):
    return BatchRows.of(
        keys=RowKey.of_uids("ab"[place % 2] for place in range(len(infos))),
        labels=[str(place) for place in range(len(infos))],
        infos=infos,
        sources=sources or ["rlla"] * len(infos),
        is_padding=is_padding or [False] * len(infos),
        step=4,
    )


@pytest.fixture
def said(caplog):
    """The lines of a run, given its steps; responses are their numbers."""
    caplog.set_level(logging.WARNING, "verl_gdpo")

    def look(config, *steps):
        caplog.clear()
        first = FirstFormats()
        for rows in steps:
            first.look(config, rows, lambda row: f"response {row}")
        return caplog.messages

    return look


def test_a_format_of_0_is_said_once_and_at_once(said):
    (line,) = said(run_config(), rows_of(ZERO, ZERO, ZERO), rows_of(ZERO, ZERO))
    assert line.startswith(
        "verl-gdpo: format of task tool_rl is 0 for all 3 samples of data_source 'rlla' in step 4"
    )
    assert "`verl-gdpo check`" in line
    assert line.endswith("with its special tokens: 'response 0'")


def test_one_sample_that_has_it_is_enough_and_later_steps_are_not_looked_at(said):
    assert said(run_config(), rows_of(ZERO, ONE), rows_of(ZERO, ZERO)) == []


def test_each_task_and_name_is_looked_at_by_itself(said):
    gsm8k = "verl_gdpo/gsm8k"
    mixed = rows_of(ONE, ZERO, {"format": None}, sources=["rlla", gsm8k, gsm8k])
    (line,) = said(run_config(), mixed)
    assert "format of task gsm8k is 0 for all 1 samples" in line and "'response 1'" in line
    verls = rows_of({"format_reward": 0.0})
    (line,) = said(run_config(), verls)
    assert "format_reward of task tool_rl" in line
    # a task without a format, an unknown source, and no row to which it applies
    assert said(run_config(), rows_of(ZERO, sources=["verl_gdpo/constraints"])) == []
    assert said(run_config(), rows_of(ZERO, sources=["mine"])) == []
    assert said(run_config(), rows_of({"format": None}, {})) == []
    # what applies later is looked at later
    late = said(run_config(), rows_of({"format": None}), rows_of(ZERO))
    assert len(late) == 1


def test_padding_does_not_count(said):
    (line,) = said(run_config(), rows_of(ONE, ZERO, is_padding=[True, False]))
    assert "all 1 samples" in line and "'response 1'" in line


def test_formats_of_others_are_their_own(said):
    own = run_config(**{"reward.custom_reward_function.path": "x.py"})
    assert said(own, rows_of(ZERO)) == []
    config = listed({"form": {"task": "tool_rl"}, "mine": {"path": "x.py"}})
    assert said(config, rows_of({"format": 0.0, "mine__format": 0.0})) == []
    (line,) = said(config, rows_of({"form__format": 0.0, "mine__format": 0.0}))
    assert "form__format of task tool_rl" in line


def test_few_samples_at_a_time_are_counted_together(caplog):
    """Dynamic sampling looks at a group at a time, and one group may be 0 by chance."""
    caplog.set_level(logging.WARNING, "verl_gdpo")
    first = FirstFormats()
    decoded = []

    def response_of(row):
        decoded.append(row)
        return f"response {len(decoded)}"

    first.look(run_config(), rows_of(ZERO, ZERO), response_of, least=5)
    first.look(run_config(), rows_of(ZERO, ZERO), response_of, least=5)
    assert caplog.messages == []
    first.look(run_config(), rows_of(ZERO), response_of, least=5)
    (line,) = caplog.messages
    assert "is 0 for all 5 samples" in line and line.endswith("'response 1'")
    # A step after it says nothing anew, and one sample that has the form ends the count.
    first.look(run_config(), rows_of(ZERO), response_of)
    other = FirstFormats()
    other.look(run_config(), rows_of(ZERO, ONE), response_of, least=5)
    other.look(run_config(), rows_of(*[ZERO] * 9), response_of, least=5)
    assert len(caplog.messages) == 1 and len(decoded) == 1


def test_the_first_response_is_shown_in_full(caplog):
    """The cause may stand in its middle: a tag of a call between two long thoughts, for example."""
    response = "a" * 20_000 + "<tool_call>" + "b" * 20_000
    FirstFormats().look(run_config(), rows_of(ZERO), lambda row: response)
    (line,) = caplog.messages
    assert line.endswith(repr(response))


def test_a_step_of_the_v1_trainer_says_it(queue, tmp_path, caplog):
    trainer = ours(tmp_path)
    infos = [{"format": 0.0, "correctness": value, "score": value} for value in (-3.0, 3.0)]
    for uid in ("u", "v"):
        queue.add_group(uid, infos, lengths=(2, 3), data_source="rlla")
    decoded = []
    trainer.tokenizer.decode = lambda ids, skip_special_tokens: decoded.append(ids) or "TEXT<eos>"
    step_of(trainer)
    lines = [line for line in caplog.messages if "format of task tool_rl is 0" in line]
    assert len(lines) == 1 and lines[0].endswith("'TEXT<eos>'")
    assert "in step 7" in lines[0] and decoded == [[0, 1]]


def test_a_run_says_once_which_numbers_have_no_weight(queue, tmp_path, caplog):
    own = f"reward.custom_reward_function.path={tmp_path}/mine.py"
    trainer = ours(tmp_path, own, "+algorithm.gdpo.rewards={a: 1, c: null}")
    infos = [{"a": value, "b": 2.0, "c": 1.0, "d": "text", "score": value} for value in (0.0, 1.0)]
    for _ in range(2):
        for uid in ("u", "v"):
            queue.add_group(uid, infos, lengths=(2, 3), data_source="mine")
        step_of(trainer)
    (line,) = [line for line in caplog.messages if "returned as numbers" in line]
    assert line.startswith("verl-gdpo: b: returned as numbers, and not in the sum")


def test_dynamic_sampling_says_it_although_no_group_is_left(queue, tmp_path, caplog):
    """Each group has one reward for all of its samples, so that no step has any of them."""
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"]
    trainer = ours(tmp_path, *filtering)
    trainer.tokenizer.decode = lambda ids, skip_special_tokens: f"{len(ids)} tokens<eos>"
    buffer = trainer.replay_buffer
    samples = record_of(buffer).samples
    infos = [{"format": 0.0, "correctness": -3.0, "score": -3.0}] * 2

    def lines_after(groups):
        for uid in groups:
            queue.add_group(uid, infos, lengths=(2, 3), data_source="rlla")
        buffer._sync_metadata_from_transfer_queue()
        assert buffer._dapo_filtered_keys("train")[0] >= set(groups)
        return [line for line in caplog.messages if "format of task tool_rl is 0" in line]

    # As many samples as a batch has are enough.
    groups = [f"u{number}" for number in range(samples // 2)]
    assert lines_after(groups[:-1]) == []
    (line,) = lines_after(groups[-1:])
    assert line.endswith("'2 tokens<eos>'") and f"all {samples} samples" in line
    assert lines_after(["more"]) == [line]


class Trainer(ray_trainer.RayPPOTrainer):
    """As much of a legacy trainer as computes advantages."""

    global_steps = 3

    def __init__(self, *overrides):
        self.config = verl_config("trainer.use_v1=False", *overrides)
        self.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"{ids}")
        empty = datasets.Dataset.from_dict({"data_source": [], "reward_model": []})
        self.train_dataset, self.val_dataset = SimpleNamespace(dataframe=empty), None
        stand_in(legacy.create_dataloader, lambda self, *loaded: None)(self, 1, 2)

    def fit(self, data):
        return ray_trainer.compute_advantage(data, adv_estimator="gdpo")


def test_a_step_of_the_legacy_trainer_says_it(caplog):
    infos = [{"format": 0.0, "correctness": float(place % 3)} for place in range(len(GROUPS))]
    columns = {
        "reward_extra_info": np.array(infos, dtype=object),
        "data_source": np.array(["rlla"] * len(GROUPS), dtype=object),
    }
    data = batch(columns)
    data.batch["responses"] = torch.arange(64).reshape(8, 8)
    trainer = Trainer()
    trainer.fit(data)
    lines = [line for line in caplog.messages if "format of task tool_rl is 0" in line]
    # its mask has one token
    assert len(lines) == 1 and lines[0].endswith("special tokens: '[0]'")
    assert "all 8 samples" in lines[0] and "in step 3" in lines[0]
    again = Trainer("reward.reward_manager.name=naive")
    caplog.clear()
    again.fit(batch(columns))
    assert not [line for line in caplog.messages if "is 0 for all" in line]
