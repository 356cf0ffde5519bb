"""What `verl-gdpo run` knows of a command: its folders, and what is added to it."""

import json
import re
import sys
from pathlib import Path

import pytest
from executable import program
from processes import completed
from saved_checkpoint import save_checkpoint, write_archive

from verl_gdpo.tools import RECIPES
from verl_gdpo.tools.run.checkpoints import TRACKER
from verl_gdpo.tools.run.command import understood, verls_trainer
from verl_gdpo.tools.run.launch import _check_of, _goes_on, _parser

MAIN = ["python", "-m", "verl.trainer.main_ppo"]


@pytest.fixture(autouse=True)
def no_ray(tmp_path_factory, monkeypatch):
    """No Ray runs that this machine's user could join."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path_factory.mktemp("ray")))


OF_RUN = ["trainer.project_name=p", "trainer.experiment_name=e"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*MAIN, "a=1"], ("verl.trainer.main_ppo", ["a=1"])),
        (["env", "A=1", "python3", "-u", *MAIN[1:]], ("verl.trainer.main_ppo", [])),
        (
            ["torchrun", "--standalone", "-m", "verl.trainer.sft_trainer", "a=1"],
            ("verl.trainer.sft_trainer", ["a=1"]),
        ),
        (["bash", "train.sh", "-m", "verl"], None),
        (["python", "-m", "verlish.main"], None),
        (["python", "train.py"], None),
        ([], None),
    ],
)
def test_trainers_of_verl_are_told_from_other_commands(words, expected):
    assert verls_trainer(words) == expected


def test_the_folder_is_verls_folder_of_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = understood([*MAIN, *OF_RUN], None, resume=False)
    assert command.folder == command.checkpoints == tmp_path / "checkpoints" / "p" / "e"
    assert command.is_verl and command.trainer["logger"] == ["console", "wandb", "file"]
    assert command.words == [*MAIN, *OF_RUN, "trainer.logger=[console,wandb,file]"]
    assert command.remarks[0].startswith("`file` is added to trainer.logger")
    assert list(tmp_path.iterdir()) == []  # it is the launcher that makes it


def test_on_a_ray_that_runs_no_hang_is_told_by_metrics_that_may_be_elsewhere(tmp_path, monkeypatch):
    """Its processes have another environment, without the place of the metrics."""
    words = [*MAIN, f"trainer.default_local_dir={tmp_path}"]
    assert understood(words, None, resume=False).trainer
    joined = [*words, "+ray_kwargs.ray_init.address=10.0.0.1:6379"]
    assert not understood(joined, None, resume=False).trainer
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not understood(words, None, resume=False).trainer


def test_the_other_trainers_have_configurations_of_their_own(tmp_path):
    overrides = [f"trainer.default_local_dir={tmp_path}/saved", "trainer.logger=console"]
    words = ["torchrun", "--nproc-per-node=8", "-m", "verl.trainer.sft_trainer", *overrides]
    command = understood(words, None, resume=False)
    assert command.folder == tmp_path / "saved"
    assert command.words[-1] == "trainer.logger=[console,file]"


def test_a_folder_that_is_named_gets_the_log_and_not_the_checkpoints(tmp_path):
    words = [*MAIN, f"trainer.default_local_dir={tmp_path}/saved", "trainer.logger=[file]"]
    command = understood(words, tmp_path / "log", resume=False)
    assert (command.folder, command.checkpoints) == (tmp_path / "log", tmp_path / "saved")
    assert command.words == words and not command.remarks


def test_recipes_write_into_their_run_dir(tmp_path):
    recipe = ["--config-dir", str(RECIPES), "--config-name", "train", "hardware=cpu"]
    words = [*MAIN, *recipe, "task=tool_rl", f"run_dir={tmp_path}/run"]
    command = understood(words, None, resume=False)
    assert command.folder == tmp_path / "run"
    assert command.checkpoints == tmp_path / "run" / "checkpoints"
    assert command.words == words
    # Where both are named, nothing has to be composed.
    named = understood([*words, "no.such.key=1"], tmp_path / "run", resume=False)
    assert named.folder == tmp_path / "run" and named.checkpoints is None


@pytest.mark.parametrize("key", ["trainer.logger", "++trainer.logger"])
def test_recipes_with_other_loggers_get_the_file_logger_too(tmp_path, key):
    recipe = ["--config-dir", str(RECIPES), "--config-name", "train", "hardware=cpu"]
    words = [*MAIN, *recipe, "task=tool_rl", f"run_dir={tmp_path}/run", f"{key}=[console,wandb]"]
    command = understood(words, tmp_path / "run", resume=False)
    assert command.words == [*words, "trainer.logger=[console,wandb,file]"]
    assert command.trainer["logger"] == ["console", "wandb", "file"]
    assert command.remarks[0].startswith("`file` is added to trainer.logger")


def test_recipes_in_another_folder_than_the_launchers(tmp_path, monkeypatch):
    """There the launcher finds no record of the start that would tell it how to watch."""
    monkeypatch.chdir(tmp_path)
    recipe = ["--config-dir", str(RECIPES), "--config-name", "train", "hardware=cpu"]
    words = [*MAIN, *recipe, "task=tool_rl"]
    other = understood([*words, "run_dir=run"], Path("log"), resume=False)
    assert other.trainer["logger"] == ["console", "file"]
    assert other.checkpoints == tmp_path / "run" / "checkpoints"
    # The same folder by another name, which run.sh quotes for Hydra: nothing is composed.
    same = understood([*words, f"run_dir='{tmp_path}/a=b'", "no.key=1"], Path("a=b"), resume=False)
    assert same.folder == Path("a=b") and not same.trainer


def test_a_resume_goes_on_from_a_whole_checkpoint(tmp_path):
    saved = f"trainer.default_local_dir={tmp_path}"
    words = [*MAIN, saved, "trainer.logger=[file]"]
    nothing = f"--resume: nothing to resume in {tmp_path}: no checkpoint"
    with pytest.raises(ValueError, match=re.escape(nothing)):
        understood(words, None, resume=True)
    save_checkpoint(tmp_path, 3)
    resumed = understood([*words, "trainer.resume_mode=disable"], None, resume=True)
    added = ["++trainer.resume_mode=auto", "++trainer.resume_from_path=null"]
    assert resumed.words[-2:] == added
    # The line that it adds is one that Hydra takes.
    assert understood(resumed.words, None, resume=True).trainer["resume_mode"] == "auto"
    # Without --resume, verl's own default goes on, and somebody should know.
    (remark,) = understood(words, None, resume=False).remarks
    assert f"verl goes on from {tmp_path}/global_step_3, as trainer.resume_mode=auto" in remark
    disabled = understood([*words, "trainer.resume_mode=disable"], None, resume=False)
    assert not disabled.remarks


def test_a_resume_of_verls_sft_trainer_is_left_to_verl(tmp_path):
    """Its shards lie in the folder of the checkpoint itself, and each rank has its rows."""
    words = ["torchrun", "-m", "verl.trainer.sft_trainer", f"trainer.default_local_dir={tmp_path}"]
    with pytest.raises(ValueError, match=r"--resume: nothing to resume in .*: no checkpoint"):
        understood(words, None, resume=True)
    checkpoint = tmp_path / "global_step_3"
    checkpoint.mkdir()
    for name in ("model_world_size_1_rank_0.pt", "data_0.pt"):
        write_archive(checkpoint / name)
    (tmp_path / TRACKER).write_text("3")
    resumed = understood(words, None, resume=True)
    assert resumed.words[-2:] == ["++trainer.resume_mode=auto", "++trainer.resume_from_path=null"]


def test_other_commands_get_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = understood(["bash", "train.sh"], None, resume=False)
    assert re.fullmatch(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(command.folder))
    assert not command.is_verl and command.checkpoints is None
    assert "its configuration is not known" in command.remarks[0]
    named = understood(["true"], Path("here"), resume=False)
    assert named.folder == Path("here") and not named.remarks
    with pytest.raises(ValueError, match="--resume needs a command of verl's"):
        understood(["bash", "train.sh"], Path("here"), resume=True)
    for words in (["bash", "train.sh"], ["torchrun", "-m", "verl.trainer.sft_trainer", "a=1"]):
        with pytest.raises(ValueError, match="--check needs a command such as: python -m verl"):
            _check_of(words, [])


def test_a_configuration_that_hydra_refuses(tmp_path):
    words = [*MAIN, "trainer.no_such_key=1"]
    with pytest.raises(ValueError, match=r"folder .* is not known: .*no_such_key.*--run-dir"):
        understood(words, None, resume=False)
    # In a folder that is named, verl says it.
    assert understood(words, tmp_path, resume=False).words == words
    with pytest.raises(ValueError, match=r"verl\.trainer\.none is no trainer"):
        understood(["python", "-m", "verl.trainer.none"], None, resume=False)


def test_the_line_that_goes_on(tmp_path):
    words = [*MAIN, f"trainer.default_local_dir={tmp_path}/a b", "trainer.logger=[file]"]
    options = _parser().parse_args(["--run-dir", "r", "--", *words])
    assert options.command == ["--", *words]
    line = _goes_on(understood(words, None, resume=False), options)
    start = "verl-gdpo run --resume --run-dir r -- python -m verl.trainer.main_ppo "
    assert line == f"{start}'trainer.default_local_dir={tmp_path}/a b' 'trainer.logger=[file]'"
    assert _goes_on(understood(["true"], None, resume=False), options) is None


# a trainer of verl's, as far as the launcher sees one
STAND_IN = """#!{python}
import json, os, sys, time
with open({arguments!r}, "w") as file:
    json.dump(sys.argv[1:], file)
print("Total training steps: 3", flush=True)
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w", buffering=1) as metrics:
    for step in (1, 2, 3):
        time.sleep(0.5)
        data = {{"critic/score/mean": step / 10}}
        metrics.write(json.dumps({{"step": step, "data": data}}) + "\\n")
{end}
"""


@pytest.fixture
def verl(tmp_path):
    """Runs `verl-gdpo run` on a stand-in for a trainer of verl's, without a `run_dir`."""
    arguments = tmp_path / "arguments.json"
    saved = tmp_path / "saved"

    def run(*options, end=""):
        python = tmp_path / "python"
        text = STAND_IN.format(python=sys.executable, arguments=str(arguments), end=end)
        program(python, text)
        words = [python, *MAIN[1:], f"trainer.default_local_dir={saved}"]
        done = completed("-m", "verl_gdpo", "run", *options, "--", *words, cwd=tmp_path)
        given = json.loads(arguments.read_text()) if arguments.exists() else None
        return done, saved, given

    return run


@pytest.mark.slow
def test_a_trainer_of_verls_runs_in_its_own_folder(verl, tmp_path):
    done, saved, given = verl()
    assert done.returncode == 0, done.stderr
    assert given[-1] == "trainer.logger=[console,wandb,file]"
    first, second, *steps, last = done.stdout.splitlines()
    assert first == (
        f"verl-gdpo run: `file` is added to trainer.logger: the metrics are in {saved}/metrics"
    )
    assert second == f"verl-gdpo run: everything that it prints: {saved}/train.log"
    shown = [line.partition("] ")[2] for line in steps]
    assert shown[0] == "step    1  score 0.100" and shown[2] == "step    3  score 0.300"
    assert re.fullmatch(r"step    2  score 0.200  \d s left of 3 steps", shown[1])
    assert last == (f"verl-gdpo run: finished; its rewards and findings: verl-gdpo summary {saved}")
    assert (saved / "train.log").read_text() == "Total training steps: 3\n"
    # The other tools find it there.
    save_checkpoint(saved, 3)
    summary = completed("-m", "verl_gdpo", "summary", saved)
    assert summary.returncode == 0 and f"{saved}/global_step_3" in summary.stdout
    # And it goes on from there.
    done, saved, given = verl("--resume")
    assert done.returncode == 0, done.stderr
    assert given[-2:] == ["++trainer.resume_mode=auto", "++trainer.resume_from_path=null"]
    assert (saved / "metrics" / "2.jsonl").exists()


def test_why_a_trainer_of_verls_ended(verl):
    done, saved, _ = verl(end='raise ValueError("the reason")')
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["ValueError: the reason", f"(whole log: {saved}/train.log)"]
    done, saved, _ = verl("--time-limit", "4", end="time.sleep(600)")
    assert done.returncode == 124
    assert done.stderr == f"time limit at step 3; {saved} has no checkpoint yet\n"
    save_checkpoint(saved, 2)
    done, saved, _ = verl("--time-limit", "4", end="time.sleep(600)")
    go_on = "time limit at step 3; go on after global_step_2 with: verl-gdpo run --resume -- "
    assert done.stderr.startswith(go_on) and f"default_local_dir={saved}" in done.stderr


def test_a_resume_without_a_checkpoint_starts_nothing(verl):
    done, saved, given = verl("--resume")
    assert done.returncode == 2 and given is None
    expected = f"verl-gdpo run: --resume: nothing to resume in {saved}: no checkpoint\n"
    assert done.stderr == expected and not saved.exists()
