"""The metrics reach W&B through verl's own `Tracking`; see `run_folder/test_tracker_logs.py`."""

import json

import wandb
from metrics_of_batch import of_batch
from verl.utils.tracking import Tracking
from wandb_records import wandb_records

STEPS = {1: of_batch(bounds={"x": (0, 1)}), 2: of_batch(bounds={"y": (0, 1)})}


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracking = Tracking("project", "run", ["wandb"], config={})
    for step, metrics in STEPS.items():
        tracking.log(data=metrics, step=step)
    tracking.finish()
    wandb.teardown()  # its service writes the file after finish() has returned
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = {}
    for record in wandb_records(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            values = {name: json.loads(value) for name, value in items.items()}
            logged[values["_step"]] = {k: v for k, v in values.items() if k.startswith("gdpo/")}
    assert logged == STEPS
