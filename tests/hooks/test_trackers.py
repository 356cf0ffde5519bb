"""The metrics reach the trackers through verl's own `Tracking`; the tests read the files again."""

import json

import pytest
import wandb
from metrics_of_batch import of_batch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.utils.tracking import Tracking
from wandb_records import wandb_records

STEPS = {1: of_batch(bounds={"x": (0, 1)}), 2: of_batch(bounds={"y": (0, 1)})}


def log(backend):
    tracking = Tracking("project", "run", [backend], config={})
    for step, metrics in STEPS.items():
        tracking.log(data=metrics, step=step)
    tracking.finish()


def test_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    log("tensorboard")
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = {step: {} for step in STEPS}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            logged[event.step][name] = event.value
    for step, metrics in STEPS.items():
        assert logged[step] == pytest.approx(metrics, abs=1e-6)  # it keeps float32


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    log("wandb")
    wandb.teardown()  # its service writes the file after finish() has returned
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = {}
    for record in wandb_records(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            values = {name: json.loads(value) for name, value in items.items()}
            logged[values["_step"]] = {k: v for k, v in values.items() if k.startswith("gdpo/")}
    assert logged == STEPS
