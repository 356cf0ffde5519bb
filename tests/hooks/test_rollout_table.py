"""The table of rollouts in the trackers: which rows, what W&B and tensorboard keep of them."""

import json
import re
from types import SimpleNamespace

import pytest
import wandb
from memory_queue import MemoryQueue
from omegaconf import OmegaConf
from quick_composition import compose_quickly as compose_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from v1_step import A_OF, dump, fill, ours, sample_and_train
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tracking import Tracking
from wandb_records import wandb_records

from verl_gdpo.hooks.rollout_table import CHARACTERS, NAME, RolloutTable, chosen
from verl_gdpo.tools.compose import PLAIN


def train(monkeypatch, folder, tracker, every):
    """A step of verl's V1 trainer, its seventh, with four rollouts and its own `Tracking`."""
    queue = MemoryQueue(monkeypatch)
    block = f"+trainer.log_rollouts={{every:{every},rows:3}}"
    trainer = ours(folder, block, f"trainer.logger=[{tracker}]")
    trainer.logger = Tracking("project", "run", [tracker], config={})
    dump(trainer, sample_and_train(trainer, len(fill(queue, text="<b>"))))
    trainer.logger.log(data={"gdpo/x/mean": 1.0}, step=7)
    trainer.logger.finish()


def test_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    train(monkeypatch, tmp_path, "tensorboard", every=7)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    (event,) = events.Tensors(f"{NAME}/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7
    assert text.count("advantage: ") == text.count("response: ") == 3
    assert all(not line or line.startswith("    ") for line in text.splitlines())
    sessions = {
        (group, int(session)): float(A)
        for group, session, A in re.findall(
            r"step: 7\s+group: (\w)\s+session: (\d)\s+data_source: d\s+advantage: (\S+)", text
        )
    }
    assert len(sessions) == 3
    for (group, session), A in sessions.items():
        assert pytest.approx(A_OF[f"{group}_{session}_0"], abs=1e-5) == A
    assert re.search(r"a: [01]\.0\n    b: 1\.0\n", text)


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    train(monkeypatch, tmp_path, "wandb", every=7)
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps = []
    for record in wandb_records(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            steps.append((json.loads(items["_step"]), NAME in str(items), "gdpo/x/mean" in items))
    assert steps == [(7, True, True)]  # one row of W&B's history has both
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.table.json")
    found = json.loads(table.read_text())
    assert found["columns"] == [
        *("step", "group", "session", "data_source", "advantage", "response_tokens"),
        *("a", "b", "text", "prompt", "response"),
    ]
    assert len(found["data"]) == 3
    for step, group, session, source, advantage, tokens, *rewards, prompt, response in found[
        "data"
    ]:
        assert advantage == pytest.approx(A_OF[f"{group}_{session}_0"], abs=1e-5)
        assert (step, source, tokens) == (7, "d", 2 + session)
        assert (prompt, response) == ("2 tokens", "3 tokens")  # the decoder of the test counts
        assert rewards == [float(group == "v" and session == 1), float(session), "<b>"]


def test_other_steps_log_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    train(monkeypatch, tmp_path, "tensorboard", every=5)
    assert not EventAccumulator(str(tmp_path / "events")).Reload().Tags()["tensors"]


def rows_of(groups, padding=()):
    return {"group": groups, "is_padding": [i in padding for i in range(len(groups))]}


def test_whole_groups_are_chosen_without_padding():
    columns = rows_of([*"aabbccdd", "pad"], padding=[8])
    drawn = {step: chosen(columns, 4, step) for step in range(20)}
    for rows in drawn.values():
        assert len(rows) == 4
        assert [columns["group"][row] for row in rows[::2]] == [
            columns["group"][row] for row in rows[1::2]
        ]
    assert len({tuple(rows) for rows in drawn.values()}) > 5
    assert drawn == {step: chosen(columns, 4, step) for step in range(20)}
    assert sorted(chosen(columns, 99, 1)) == [*range(8)]


def test_long_texts_are_cut():
    kept = {}
    writer = SimpleNamespace(add_text=lambda name, text, step: kept.update({name: text}))
    columns = rows_of(["a"]) | {"session": [0], "advantage": [0.5], "response_tokens": [9]}
    columns |= {"rewards": [{"x": 1.0}], "data_source": ["d"]}
    table = RolloutTable(every=1, rows=1)
    trackers = {"tensorboard": SimpleNamespace(writer=writer)}
    table.log(trackers, 3, ["p" * 5000 + "END"], ["START" + "r" * 5000], columns)
    text = kept[NAME]
    assert "    prompt: [4003 more characters] p" in text and "END\n" in text
    assert "    response: START" in text and text.endswith("r [4005 more characters]")
    assert len(text) < 2 * CHARACTERS + 300


@pytest.mark.parametrize(
    ("block", "trainer", "message"),
    [
        ({"every": 0}, {}, "steps of 1 or more"),
        ({"rows": 4}, {}, "expected {every: STEPS, rows: ROWS}"),
        ({"every": 2, "rows": 65}, {}, "1 to 64 rows"),
        ({"every": True}, {}, "steps of 1 or more"),
        ({"evry": 2}, {}, "trainer.log_rollouts={'evry': 2}: expected"),
        (20, {}, "trainer.log_rollouts=20: expected"),
        ({"every": 2}, {"rollout_data_dir": None}, "needs trainer.rollout_data_dir"),
        ({"every": 2}, {"logger": ["console", "file"]}, "has none of ('wandb', 'tensorboard')"),
    ],
)
def test_what_is_refused(block, trainer, message):
    good = {"rollout_data_dir": "x", "logger": ["wandb"], "log_rollouts": block}
    with pytest.raises(ValueError) as error:
        RolloutTable.of(OmegaConf.create({"trainer": {**good, **trainer}}), has_rewards=True)
    assert message in str(error.value)


def test_nothing_is_asked_for():
    assert RolloutTable.of(OmegaConf.create({"trainer": {"logger": ["console"]}}), True) is None
    assert RolloutTable.of(OmegaConf.create({}), True) is None
    one = {"rollout_data_dir": "x", "logger": "wandb", "log_rollouts": {"every": 2}}
    assert RolloutTable.of(OmegaConf.create({"trainer": one}), True) == RolloutTable(2, 8)


@pytest.mark.parametrize("trainer_class", [get_trainer_cls("sync"), RayPPOTrainer])
def test_a_table_that_no_trainer_would_log_is_refused(trainer_class):
    """Neither a V1 trainer without our rewards nor the legacy trainer may leave the key unread."""
    plain = compose_config(None, PLAIN, ["+trainer.log_rollouts.every=2"])
    with pytest.raises(ValueError, match=r"needs a V1 trainer with algorithm\.adv_estimator"):
        if trainer_class is RayPPOTrainer:
            trainer = object.__new__(trainer_class)
            trainer.config = plain
            trainer._create_dataloader(None, None, None, None)
        else:
            trainer_class(plain)
