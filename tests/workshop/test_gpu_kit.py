"""The kit for a machine with a GPU and no network: pieces, environment, stages, results.

A stage that is run here is a made-up command; the commands of the real ones are composed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import is_alive
from quick_composition import compose_quickly as compose_config
from repository import REPO

from workshop.benchmarks.step_model import TOOL_RL, forward_flops
from workshop.gpu_kit import install, made_work, pack, pieces, run
from workshop.gpu_kit.results import AGREEMENT, Results, medians, problem_of_training, table
from workshop.gpu_kit.stages import TESTS, Place, Stage, stages

FITTING = {"cpu": (), "cuda": ("hardware=1gpu",)}
# as verl's file logger writes, then whatever `end` is
TWO_STEPS = """
import json, os, time
file = open(os.environ["VERL_FILE_LOGGER_PATH"], "a")
for step in (1, 2):
    data = {"timing_s/step": step, "timing_s/none": None, "not/kept": 1}
    print(json.dumps({"step": step, "data": data}), file=file, flush=True)
print("two steps are done", flush=True)
open("PID", "w").write(str(os.getpid()))
"""


def place_at(folder, device="cpu"):
    return Place(device, sys.executable, folder / "data", folder / "work", FITTING[device])


@pytest.fixture
def packed(tmp_path):
    """A folder with 25 KB of no order, in pieces of 10 KB."""
    source = tmp_path / "source"
    (source / "wheels").mkdir(parents=True)
    (source / "wheels" / "a.whl").write_bytes(np.random.default_rng(0).bytes(25_000))
    (source / "core.txt").write_text("a==1\n")
    made = pieces.split(source, "core", tmp_path / "pieces", piece_bytes=10_000)
    return source, tmp_path / "pieces", made


def test_the_tests_of_the_kit_exist():
    assert all((REPO / "tests" / name).is_file() for name in TESTS)


def test_pieces_and_back(packed, tmp_path):
    source, folder, made = packed
    assert [piece.name for piece in made] == [f"core.tar.0{i}" for i in range(len(made))]
    (folder / "core.tar.99").touch()  # of a larger pack before
    assert pieces.split(source, "core", folder, piece_bytes=10_000) == made
    assert sorted(folder.glob("core.tar.*")) == made
    assert len(made) > 2 and all(piece.stat().st_size <= 10_000 for piece in made)
    pieces.join(folder, "core", tmp_path / "back")
    for path in ("wheels/a.whl", "core.txt"):
        assert (tmp_path / "back" / path).read_bytes() == (source / path).read_bytes()
    subprocess.run(["sha256sum", "-c", "--quiet", "core.sha256"], cwd=folder, check=True)


def test_a_damaged_and_a_missing_piece_are_named(packed, tmp_path):
    _, folder, made = packed
    content = bytearray(made[1].read_bytes())
    content[500] ^= 1
    made[1].write_bytes(content)
    made[2].unlink()
    with pytest.raises(ValueError, match=r"core.tar.01 is damaged.*core.tar.02 is missing"):
        pieces.join(folder, "core", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_a_machine_has_is_not_packed():
    pins = ["numpy==2.3.5", "hf-xet==1.8.0", "pandas==3.1.1", "ray==2.60.0"]
    present = "numpy==2.5.2\nHF_xet==1.8.0\npandas\n"
    assert pack.without_present(pins, present) == ["numpy==2.3.5", "ray==2.60.0"]


def test_the_environment_sees_this_pythons_packages_behind_its_own(tmp_path):
    python = install.make_venv(tmp_path / "venv")
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (own / "wrapt.py").write_text("mine = True")
    code = "import pytest, wrapt; print(pytest.__file__, wrapt.mine)"
    done = subprocess.run(
        [python, "-c", code],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [pytest.__file__, "True"], done.stderr


def test_another_python_than_packed_for_is_refused():
    with pytest.raises(ValueError, match=r"packed for 3\.99\. Start this with python3\.99"):
        install.check_python("3.99\n")


ROLLOUTS = {  # on a GPU: what verl has to import for it
    "hf": "workshop.gpu_kit.hf_rollout",
    "made": "workshop.gpu_kit.made_rollout",
    "vllm": None,
}


def trainings_of(place):
    """Those that can run on its device."""
    ran = [stage for stage in stages(place) if not (stage.needs_gpu and place.device == "cpu")]
    return [stage for stage in ran if stage.steps]


def overrides_of(stage):
    return list(stage.command[stage.command.index("train") + 1 :])


@pytest.fixture(scope="module", params=["cuda", pytest.param("cpu", marks=pytest.mark.slow)])
def composed(request, tmp_path_factory):
    """A place, and each training that can run on its device with its configuration."""
    place = place_at(tmp_path_factory.mktemp(request.param), request.param)
    return place, [
        (stage, compose_config(REPO / "recipes", "train", overrides_of(stage)))
        for stage in trainings_of(place)
    ]


def test_every_training_composes(composed):
    place, trainings = composed
    assert len(trainings) == {"cpu": 3, "cuda": 5}[place.device]
    for stage, config in trainings:
        rollout = config.actor_rollout_ref.rollout
        assert config.run_dir == str(place.work / stage.name)
        assert config.trainer.total_training_steps == stage.steps
        assert config.trainer.device == place.device
        assert rollout.name == {"c": "vllm", "d": "made"}.get(stage.name[0], "hf")
        if rollout.name != "vllm":  # `check_rollout_config` takes no other
            assert rollout.dtype == "float32"
        if place.device == "cuda":
            assert stage.env.get("VERL_USE_EXTERNAL_MODULES") == ROLLOUTS[rollout.name]


def test_the_tiny_policy_and_its_rows_are_packed(composed):
    """Nothing is downloaded: each training reads what was packed, or what stage d_model made."""
    place, trainings = composed
    packed = {str(place.data / name) for name in pack.DATA}
    made = f"{place.work}/d_model/made"
    for _, config in trainings:
        read = [config.actor_rollout_ref.model.path, config.data.train_files, config.data.val_files]
        assert {str(Path(path).parent) for path in read[1:]} | {read[0]} <= packed | {
            made,
            f"{made}/model",
        }
    tokenizer = next(stage for stage in stages(place) if stage.name == "d_model").command
    assert tokenizer[tokenizer.index("--tokenizer") + 1] in packed


def test_what_is_computed_is_of_the_run(tmp_path):
    (stage,) = [s for s in stages(place_at(tmp_path, "cuda")) if s.name == "d_sdpa"]
    record = {"steps": {"1": {"prompt_length/mean": 780, "response_length/mean": 85}}}
    found = run.computed_s(stage, record, ["NVIDIA H100 80GB HBM3"])
    assert {*found} == {"log-probabilities, twice", "update"}
    best, worst = found["update"]
    assert worst == pytest.approx(2 * best)
    # 4 forward passes over a quarter of the paper's prompts, at half of 989 TFLOPS
    assert best == pytest.approx(forward_flops(TOOL_RL) / (0.5 * 989e12))
    assert run.computed_s(stage, record, ["NVIDIA L4"]) == {}


@pytest.mark.slow
def test_a_stage_that_hangs_is_ended_and_its_steps_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE_SECONDS", 0.0)
    saved, save = [], Results.save

    def save_and_note(self):
        save(self)
        one = Results(self.path).stage("b")
        saved.append((one["status"], len(one["steps"])))

    monkeypatch.setattr(Results, "save", save_and_note)
    pid = tmp_path / "pid"
    code = TWO_STEPS.replace("PID", str(pid)) + "time.sleep(600)"
    stage = Stage("b", "made up", 60, [sys.executable, "-c", code], steps=2)
    results = Results(tmp_path / "results.json")
    assert run.run_stage(stage, place_at(tmp_path), results, {}, limit_s=4) == "time limit"
    assert ("running", 2) in saved  # what a kill would leave
    found = Results(tmp_path / "results.json").stage("b")
    assert found["status"] == "time limit" and found["exit_code"] == 124
    assert found["steps"] == {"1": {"timing_s/step": 1}, "2": {"timing_s/step": 2}}
    assert "two steps are done" in found["log"]
    assert not is_alive(int(pid.read_text()))


def test_a_later_call_goes_on_with_the_results(tmp_path, capsys):
    place = place_at(tmp_path)
    fine = Stage("a_tests", "made up", 60, [sys.executable, "-c", "print('fine')"])
    bad = Stage("b", "made up", 60, [sys.executable, "-c", "raise ValueError('no luck')"])
    later = Stage("d_sdpa", "made up", 60, ["true"], after="d_model")
    absent = Stage("c", "made up", 60, ["true"], needs="no_such_module")
    until = time.monotonic() + 1000
    assert run.run_all([fine], place, tmp_path, {}, until)
    assert not run.run_all([bad, later, absent], place, tmp_path, {}, until)
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert {name: stage["status"] for name, stage in found.items()} == {
        "a_tests": "ok",
        "b": "failed",
        "d_sdpa": "left out: d_model is not done",
        "c": "left out: no_such_module is not installed",
    }
    assert found["b"]["log"][-1] == "ValueError: no luck"
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.strip() in capsys.readouterr().out
    assert run.run_all([fine], place, tmp_path, {}, until=0)  # no time: the result of before stays
    assert Results(tmp_path / "results.json").stage("a_tests")["status"] == "ok"


def test_every_stage_is_named_without_a_gpu_and_some_are_left_out(tmp_path):
    place = place_at(tmp_path, "cpu")
    all_names = [[s.name for s in stages(place_at(tmp_path, device))] for device in FITTING]
    assert all_names[0] == all_names[1]
    chosen = [stage for stage in stages(place) if stage.needs_gpu]
    assert [stage.name for stage in chosen] == ["c", "d_flash"]
    assert run.run_all(chosen, place, tmp_path, {}, time.monotonic() + 1000)
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert {stage["status"] for stage in found.values()} == {"left out: it needs a GPU"}


def test_a_training_without_its_steps_or_its_weights_has_failed():
    good, bad = {AGREEMENT: 0.999}, {AGREEMENT: 0.2}
    assert problem_of_training({"1": good, "2": good}, 2, True) == ""
    assert problem_of_training({"1": good}, 2, True) == "1 of 2 steps"
    assert AGREEMENT in problem_of_training({"1": good, "2": bad}, 2, True)
    assert AGREEMENT in problem_of_training({"1": good, "2": {}}, 2, True)
    assert problem_of_training({"1": {}, "2": bad}, 2, False) == ""


def test_the_table_leaves_the_first_step_out():
    names = ("timing_s/step", "actor/perf/max_memory_allocated_gb")  # as verl logged on a GPU
    steps = {str(n): dict.fromkeys(names, s) for n, s in enumerate([90.0, 3.0, 5.0, 4.0], start=1)}
    assert medians(steps) == dict.fromkeys(names, 4.0)
    assert "left out" in table({"b": {"status": "left out: no time"}})


def test_made_rows_are_as_long_and_as_uneven_as_toolrls():
    """Of 399 rows of ToolRL: 780 + 85 tokens, and 1.7 times as many with padding by eights."""
    rng = np.random.default_rng(0)
    prompts = [made_work.prompt_length(rng, 2048) for _ in range(4000)]
    responses = [made_work.response_length(rng, 1024) for _ in range(4000)]
    assert np.mean(prompts) == pytest.approx(780, rel=0.03)
    assert np.mean(responses) == pytest.approx(85, rel=0.03)
    assert max(prompts) <= 2048 - made_work.TEMPLATE_TOKENS and min(responses) >= 1
    both = [p + r for p, r in zip(prompts, responses, strict=True)]
    eights = [both[i : i + 8] for i in range(0, len(both), 8)]
    padded = sum(8 * max(eight) for eight in eights)
    assert padded / sum(both) == pytest.approx(1.7, abs=0.06)
