"""A start is recorded, and compared with the run whose checkpoint it would load."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf
from repository import REPO
from saved_checkpoint import save_checkpoint
from stand_in import stand_in
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verls_run import run_with_plugins

from verl_gdpo.hooks.extend import attach, call_original
from verl_gdpo.tools.compose import compose_config
from verl_gdpo.tools.run.checkpoint_loading import (
    SAVED_BEFORE,
    check_and_load_rows,
    load_and_count,
    mend_tracker,
)
from verl_gdpo.tools.run.checkpoints import TRACKER
from verl_gdpo.tools.run.record import recorded_start
from verl_gdpo.tools.run.resume import arguments
from verl_gdpo.tools.run.starts import starts_of

GRPO = "algorithm.adv_estimator=grpo"
RUNTIME = "ray_kwargs.ray_init.runtime_env.env_vars"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with data, where relative paths begin; W&B is not set up."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", SAVED_BEFORE):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes away what a start sets
        monkeypatch.delenv(name)
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").write_text(name)
    return tmp_path


SETTINGS = {
    "algorithm": {"adv_estimator": "gdpo"},
    "data": {"train_files": "train.parquet", "val_files": "test.parquet"},
    "trainer": {"resume_mode": "auto", "resume_from_path": None, "logger": ["console", "file"]},
    "ray_kwargs": {"ray_init": {"num_cpus": 2}},
}


def recipe(*overrides):
    """As much of the recipes' configuration as is read here."""
    trainer = {"default_local_dir": "${run_dir}/checkpoints"}
    places = OmegaConf.create({"recipes": "verl-gdpo", "run_dir": "run", "trainer": trainer})
    return OmegaConf.merge(SETTINGS, places, OmegaConf.from_dotlist([*overrides]))


def composed(*overrides):
    """The recipes' configuration, as Hydra composes it."""
    files = ("data.train_files=train.parquet", "data.val_files=test.parquet", "run_dir=run")
    return compose_config(REPO / "recipes", "train", [*overrides, *files])


def resumed(run, *overrides):
    """What a command composes that goes on with a run."""
    given = arguments(Path(run).resolve(), ["task=tool_rl", *overrides])
    return compose_config(Path(given[1]), given[3], given[4:])


def plain(*overrides):
    """The same of a plain command of verl."""
    place = {"trainer": {"default_local_dir": "checkpoints/project/name"}}
    return OmegaConf.merge(SETTINGS, place, OmegaConf.from_dotlist([*overrides]))


def start(config, is_recorded=True):
    with recorded_start(config, is_recorded=is_recorded):
        pass


def saved(folder="run/checkpoints", step=3):
    return save_checkpoint(Path(folder), step)


def test_a_grpo_run_that_is_resumed_without_a_word_stays_grpo():
    """Also where its folder was moved; with the recipes, as Hydra composes them."""
    start(composed("hardware=cpu", "estimator=grpo"))
    saved()
    Path("run").rename("moved")
    config = resumed("moved", "hardware=cpu")
    assert config.algorithm.adv_estimator == "grpo"
    assert config.trainer.default_local_dir == f"{Path.cwd()}/moved/checkpoints"
    start(config)
    first, second = (one.start for one in starts_of(Path("moved")))
    assert second.step == 3 and second.changes == {}
    assert second.recipes["estimator"] == first.recipes["estimator"] == "grpo"
    assert second.configuration["algorithm"] == first.configuration["algorithm"]


@pytest.mark.parametrize("make", [recipe, plain])
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_another_estimator_is_refused(make, mode):
    start(make("algorithm.adv_estimator=grpo"))
    checkpoint = saved(make().trainer.default_local_dir)
    how = [f"trainer.resume_mode={mode}", f"trainer.resume_from_path={checkpoint}"]
    with pytest.raises(ValueError, match=r"'grpo' -> 'gdpo'") as error:
        start(make("algorithm.adv_estimator=gdpo", *how))
    assert f"starts{os.sep}1: " in str(error.value)
    config = make("algorithm.adv_estimator=gdpo", *how, "allow_change=[algorithm.adv_estimator]")
    start(config)
    assert "allow_change" not in config
    run = Path("run") if make is recipe else Path(config.trainer.default_local_dir)
    first, second = starts_of(run)
    assert first.start.configuration["algorithm"]["adv_estimator"] == "grpo"
    changes = {"algorithm.adv_estimator": ["grpo", "gdpo", "on request"]}
    assert second.start.changes == changes
    assert "allow_change" not in (second.folder / "composed.yaml").read_text()
    start(make("algorithm.adv_estimator=grpo", *how))
    assert starts_of(run)[2].start.changes == {}


def test_a_start_counts_once_it_has_trained_up_to_a_checkpoint():
    """A change of one that was stopped before is not that of the run."""
    start(recipe(GRPO))
    saved()
    start(recipe("allow_change=[algorithm]"))
    with pytest.raises(ValueError, match=r"'grpo' -> 'gdpo'"):
        start(recipe())
    start(recipe("allow_change=[algorithm]"))
    saved(step=6)
    start(recipe())
    changes = [one.start.changes for one in starts_of(Path("run"))]
    changed = {"algorithm.adv_estimator": ["grpo", "gdpo", "on request"]}
    assert changes == [{}, changed, changed, {}]
    assert arguments(Path("run").resolve(), [])[1].endswith(f"starts{os.sep}3")


def test_data_count_by_their_size_and_time(place, capsys):
    start(recipe())
    saved()
    (place / "train.parquet").rename(place / "moved.parquet")
    start(recipe("data.train_files=moved.parquet"))
    (place / "train.parquet").write_text("other rows")
    with pytest.raises(ValueError, match=r"data.train_files: '\d+ bytes "):
        start(recipe())
    assert len(starts_of(Path("run"))) == 2
    start(recipe("allow_change=[data.train_files]"))
    assert "WARNING: changed in this resume: data.train_files: '5 bytes" in capsys.readouterr().err


def test_what_the_environment_says_is_not_recorded(monkeypatch):
    """It may be a secret. Files that it names count by size and time all the same."""
    monkeypatch.setenv("MY_KEY", "hunter2")
    monkeypatch.setenv("ROWS", "train.parquet")
    given = [
        *("reward.key=${oc.env:MY_KEY}", "reward.header=Bearer ${reward.key}"),
        *("reward.user=${oc.env:NOBODY,me}", "data.train_files=${oc.env:ROWS}"),
    ]
    start(recipe(*given))
    assert "hunter2" not in "".join(path.read_text() for path in Path("run").rglob("*.yaml"))
    (first,) = (one.start for one in starts_of(Path("run")))
    assert first.configuration["reward"] == {
        "key": "${oc.env:MY_KEY}",
        "header": "Bearer ${reward.key}",
        "user": "${oc.env:NOBODY,me}",
    }
    assert first.files.keys() == {"data.train_files", "data.val_files"}
    assert recipe(*given).reward.header == "Bearer hunter2"  # elsewhere nothing has changed
    saved()
    monkeypatch.setenv("MY_KEY", "another")
    start(recipe(*given))
    assert starts_of(Path("run"))[1].start.changes == {}
    monkeypatch.setenv("ROWS", "test.parquet")
    with pytest.raises(ValueError, match=r"data.train_files: '\d+ bytes "):
        start(recipe(*given))


def test_a_run_without_a_manifest_goes_on_with_a_warning(capsys):
    saved()
    start(recipe())
    assert "nothing tells whether the settings are those of its run" in capsys.readouterr().err


def test_how_it_ended():
    start(recipe())
    with pytest.raises(ZeroDivisionError), recorded_start(recipe(), is_recorded=True):
        raise ZeroDivisionError("first line\nlast line")
    ends = [one.end["why"] for one in starts_of(Path("run"))]
    assert ends == ["finished", "ZeroDivisionError: last line"]


def test_what_ended_a_run_is_worth_more_than_what_became_of_its_folder():
    """Whether it was damaged meanwhile, or deleted."""
    with pytest.raises(ZeroDivisionError), recorded_start(recipe(), is_recorded=True):
        Path("run/starts/1/start.yaml").write_text("a: [")
        raise ZeroDivisionError("the reason")
    with pytest.raises(ZeroDivisionError), recorded_start(recipe(), is_recorded=True):
        shutil.rmtree("run")
        raise ZeroDivisionError("the reason")


def test_a_folder_that_cannot_be_written_is_said(capsys):
    Path("run").touch()
    start(recipe())
    assert "the start is not recorded" in capsys.readouterr().err


def test_a_run_that_is_not_ours_is_left_alone():
    others = OmegaConf.create({"run_dir": {"root": "x"}, "allow_change": "mine"})
    config = OmegaConf.merge(plain("algorithm.adv_estimator=grpo"), others)
    start(config, is_recorded=False)
    assert (config.allow_change, config.run_dir.root) == ("mine", "x")
    start(plain("algorithm.adv_estimator=grpo"), is_recorded=False)
    assert not Path("checkpoints").exists()
    start(plain("algorithm.adv_estimator=gdpo"))
    saved("checkpoints/project/name")
    with pytest.raises(ValueError, match=r"'gdpo' -> 'grpo'"):
        start(plain("algorithm.adv_estimator=grpo"), is_recorded=False)


def test_a_resume_goes_on_in_the_same_run_of_wandb(monkeypatch):
    found = []
    for _ in range(2):
        config = recipe("trainer.logger=[console,wandb]")
        start(config)
        found.append(OmegaConf.to_container(OmegaConf.select(config, RUNTIME)))
        assert {name: os.environ[name] for name in found[-1]} == found[-1]
        for name in found[-1]:
            monkeypatch.delenv(name)
        saved(step=len(found))
    assert found[0] == found[1]
    assert found[0].keys() == {"WANDB_RUN_ID", "WANDB_RESUME"}
    assert found[0]["WANDB_RESUME"] == "allow" and len(found[0]["WANDB_RUN_ID"]) == 8
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    start(recipe("trainer.logger=wandb"))
    ids = [one.start.wandb_run_id for one in starts_of(Path("run"))]
    assert ids == [found[0]["WANDB_RUN_ID"]] * 2 + ["mine"]
    monkeypatch.delenv("WANDB_RUN_ID")
    start(recipe())
    assert "WANDB_RUN_ID" not in os.environ


ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def trained(config, flash_attn, monkeypatch):
    """A start as verl's main module makes it; the attention that the training is given."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn") if flash_attn else None)
    given = []
    run_with_plugins(lambda config, task_runner_class=None: given.append(config), config)
    return OmegaConf.select(given[0], ATTENTION)


@pytest.mark.slow
def test_auto_chooses_again_where_a_run_goes_on(monkeypatch):
    """Without flash-attn there, it would else fail in a worker; the change is written down."""
    assert trained(composed("hardware=8gpu"), True, monkeypatch) == "flash_attention_2"
    saved()
    for step, flash_attn, expected in [(6, False, "packed_sdpa"), (9, True, "flash_attention_2")]:
        assert trained(resumed("run", "hardware=8gpu"), flash_attn, monkeypatch) == expected
        saved(step=step)
    first, second, third = starts_of(Path("run"))
    chosen = [
        OmegaConf.select(OmegaConf.create(one.start.configuration), ATTENTION)
        for one in (first, second, third)
    ]
    assert chosen == ["flash_attention_2", "packed_sdpa", "flash_attention_2"]
    assert second.start.changes == {ATTENTION: [*chosen[:2], "free"]}
    assert third.start.changes == {ATTENTION: [*chosen[1:], "free"]}
    for one in (first, second, third):
        written = OmegaConf.load(one.folder / "composed.yaml")
        assert OmegaConf.select(written, ATTENTION) == "auto"
        assert "allow_change" not in written


def test_the_folder_of_a_run_is_one_for_all_processes(monkeypatch):
    """Ray's processes on a cluster that runs have the current folder of `ray start`."""
    config = composed("hardware=8gpu")
    trained(config, True, monkeypatch)
    assert config.run_dir == str(Path("run").resolve())
    assert config.trainer.default_local_dir == f"{Path('run').resolve()}/checkpoints"


def test_what_a_full_disk_left_empty_is_the_newest_whole_checkpoint(tmp_path):
    for step in (3, 9, 10, 11):
        save_checkpoint(tmp_path, step)
    (tmp_path / "global_step_11" / "data.pt").unlink()  # the disk was full before it
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(ValueError, match="invalid literal for int"):
        find_latest_ckpt_path(tmp_path)  # verl by itself
    mend_tracker(tmp_path)
    assert find_latest_ckpt_path(tmp_path) == f"{tmp_path}/global_step_10"


def test_a_tracker_is_left_as_it_is(tmp_path):
    mend_tracker(tmp_path)  # nothing was saved
    assert not (tmp_path / TRACKER).exists()
    for step in (6, 3):
        save_checkpoint(tmp_path, step)
    mend_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "3"


@pytest.mark.parametrize(
    ("said", "there", "what", "advice"),
    [
        ("6", [3], "global_step_6 is missing", r"steps \[3\]"),
        ("six", [3], "global_step_six is missing", r"steps \[3\]"),
        ("", [], "has no whole checkpoint", r"Delete .* to start anew"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_no_start_from_scratch(
    tmp_path, said, there, what, advice
):
    for step in there:
        save_checkpoint(tmp_path, step)
    save_checkpoint(tmp_path, 9)
    shutil.rmtree(tmp_path / "global_step_9" / "actor")  # as verl does with an old one
    (tmp_path / TRACKER).write_text(said)
    with pytest.raises(ValueError, match=rf"says '{said}', but .*{what}\. .*{advice}"):
        mend_tracker(tmp_path)


OPTIMIZER = "actor/optim_world_size_1_rank_0.pt"


@pytest.mark.parametrize("make", [recipe, plain])
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_no_start_from_a_checkpoint_with_an_empty_file(make, mode, is_ours):
    """Whichever command of verl goes on with a run of ours, with the launcher or without."""
    start(make())
    folder = Path(make().trainer.default_local_dir)
    for step in (3, 6):
        checkpoint = saved(folder, step).resolve()
    (checkpoint / OPTIMIZER).write_bytes(b"")
    how = [f"trainer.resume_mode={mode}", f"trainer.resume_from_path={checkpoint}"]
    with pytest.raises(ValueError, match=rf"{OPTIMIZER} is empty.* of the steps \[3\]") as error:
        start(make(*how), is_ours)
    run = Path("run") if make is recipe else folder
    assert len(starts_of(run)) == 1
    if mode == "auto":
        (folder / TRACKER).write_text("3")
    else:
        how = ["trainer.resume_mode=resume_path", str(error.value).split(": ")[-1]]
    start(make(*how), is_ours)
    assert starts_of(run)[1].start.step == 3


def test_a_named_checkpoint_may_be_without_the_place_in_the_rows():
    """verl then begins with the first row, and says so."""
    checkpoint = saved()
    (checkpoint / "data.pt").unlink()
    start(recipe("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"))
    assert starts_of(Path("run"))[0].start.step == 3
    with pytest.raises(ValueError, match=r"data\.pt is missing"):
        start(recipe())


def test_a_script_without_run_ppo_is_refused_by_the_trainer():
    """Before the model is loaded, if the trainer is one with gdpo."""
    (saved() / OPTIMIZER).write_bytes(b"")
    trainer = SimpleNamespace(config=recipe())
    assert stand_in(check_and_load_rows, lambda self: "rows")(trainer) == "rows"
    attach(trainer, object())
    with pytest.raises(ValueError, match=rf"{OPTIMIZER} is empty"):
        stand_in(check_and_load_rows, pytest.fail)(trainer)


KEPT = "trainer.max_actor_ckpt_to_keep"


def manager():
    """verl's of rank 0, without a process group."""
    made = FSDPCheckpointManager.__new__(FSDPCheckpointManager)
    made.previous_saved_paths = []
    return made


def train(checkpoints, steps, kept):
    """Save as verl's engine does it; return the steps whose weights are there in the end."""
    for step in steps:
        checkpoints.ensure_checkpoint_capacity(kept)
        folder = saved(step=step).resolve() / "actor"
        checkpoints.register_checkpoint(str(folder), kept)
    return sorted(int(path.parts[-2][12:]) for path in Path("run").glob("*/global_step_*/actor"))


def go_on(step, kept, load=load_and_count):
    """A manager that has loaded a checkpoint in a start that goes on from it."""
    (Path("run/checkpoints") / TRACKER).write_text(str(step))
    config = recipe(f"{KEPT}={kept}")
    start(config)
    made = manager()
    folder = Path(f"run/checkpoints/global_step_{step}/actor").resolve()
    stand_in(load, lambda self, local_path: None)(made, local_path=str(folder))
    return made, config


def test_a_resume_counts_the_checkpoints_that_are_there():
    """verl alone forgets them at each resume, and keeps as many more."""
    start(recipe(f"{KEPT}=2"))
    assert train(manager(), [2, 4, 6], kept=2) == [4, 6]
    made, config = go_on(6, kept=2)
    assert json.loads(os.environ[SAVED_BEFORE]).keys() == {"actor"}
    assert OmegaConf.select(config, RUNTIME)[SAVED_BEFORE] == os.environ[SAVED_BEFORE]
    assert train(made, [8, 10], kept=2) == [8, 10]
    made, _ = go_on(10, 2, load=call_original)
    assert train(made, [12, 14], kept=2) == [8, 10, 12, 14]


def test_a_resume_from_an_earlier_checkpoint_deletes_none_that_is_newer():
    start(recipe(f"{KEPT}=2"))
    train(manager(), [2, 4, 6], kept=3)
    (Path("run/checkpoints/global_step_6") / OPTIMIZER).write_bytes(b"")
    made, _ = go_on(4, kept=2)
    assert [Path(path).parts[-2] for path in made.previous_saved_paths] == [
        "global_step_2",
        "global_step_4",
    ]
    assert train(made, [5], kept=2) == [4, 5, 6]


def test_what_was_kept_on_purpose_is_not_deleted():
    """All checkpoints, by a start without a limit; those of another run."""
    start(recipe(f"{KEPT}=null"))
    train(manager(), [2, 4, 6], kept=None)
    made, _ = go_on(6, kept=2)
    assert train(made, [8], kept=2) == [2, 6, 8]
    assert go_on(8, kept="null")[0].previous_saved_paths == []
    assert SAVED_BEFORE not in os.environ
    other = saved("other/checkpoints", 4).resolve()
    start(
        recipe(f"{KEPT}=2", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={other}")
    )
    assert SAVED_BEFORE not in os.environ
