"""The stages of `run_tool_rl.sh` and their arguments, with a Python that only notes its calls.

`test_run_tool_rl.py` runs the real stages.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from composed_recipes import composed
from executable import program
from hydra.core.override_parser.overrides_parser import OverridesParser
from processes import is_alive, wait_for
from repository import REPO
from saved_checkpoint import save_checkpoint
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_gdpo.tools.run.processes import locked
from verl_gdpo.tools.run.starts import StartManifest, now, write

PYTHON = r"""#!/bin/bash
call=$(mktemp "$CALLS/XXXXXX")
printf '%s\0' "$PWD" "$@" >"$call"
[[ $* != *"verl_gdpo run "* ]] || exit "${LAUNCH_EXIT:-0}"
"""
OWN_DATA = ("data.train_files=a", "data.val_files=b")


# as setup_env.sh answers; `say` is what it does besides
SETUP = """#!/bin/bash
if [ "$1" = python ]; then echo python3; exit; fi
{say}
echo "{root}/venv-$1"
"""
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository whose environment is there, and a folder `home` to stand in."""
    root = tmp_path / "repo"
    program(root / "setup_env.sh", SETUP.format(root=root, say=""))
    for hardware in ("cpu", "gpu"):
        program(root / f"venv-{hardware}" / "bin" / "python", PYTHON)
    for script in ("run.sh", "run_tool_rl.sh"):
        shutil.copy(REPO / script, root)
    (root / "recipes" / "hardware").mkdir(parents=True)
    for hardware in ("cpu", "1gpu", "8gpu"):
        (root / "recipes" / "hardware" / f"{hardware}.yaml").touch()
    (root / "recipes" / "task").mkdir()
    for task in ("tool_rl", "gsm8k"):
        (root / "recipes" / "task" / f"{task}.yaml").touch()
    (root / "verl_gdpo" / "tools" / "run").mkdir(parents=True)
    for module in ("checkpoints.py", "ray_folders.py"):
        shutil.copy(REPO / "verl_gdpo/tools/run" / module, root / "verl_gdpo/tools/run")
    finds(root, "hardware=cpu")
    for folder in ("deep/home", "calls", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return root


def says_what_it_gets(checkout):
    program(checkout / "setup_env.sh", SETUP.format(root=checkout, say='echo "$@" >&2'))


def finds(checkout, overrides):
    """What the look at the GPUs says."""
    (checkout / "verl_gdpo" / "tools" / "run" / "gpus.py").write_text(f"print({overrides!r})")


def call(checkout, *arguments, script=None, hardware="cpu"):
    """The script as called by somebody who stands in `home`."""
    chosen = [f"hardware={hardware}"] if hardware else []
    return subprocess.run(
        [script or checkout / "run_tool_rl.sh", *chosen, *arguments],
        cwd=checkout.parent / "deep" / "home",
        capture_output=True,
        text=True,
        timeout=60,
    )


def run_sh(checkout, *arguments):
    return call(checkout, *arguments, script=checkout / "run.sh", hardware=None)


def stages(checkout):
    """{module, with its command: (folder, arguments)} of what was run."""
    found = {}
    for path in (checkout.parent / "calls").iterdir():
        folder, *arguments = path.read_text().split("\0")[:-1]
        module, command = arguments[arguments.index("-m") + 1 :][:2]
        name = f"verl-gdpo {command}" if module == "verl_gdpo" else module
        name = "hf download" if module == "huggingface_hub.cli.hf" else name
        found[name] = Path(folder), arguments
        path.unlink()
    return found


def overrides(arguments):
    """{key: value} as Hydra reads the training's; a later one wins."""
    given = arguments[arguments.index("train") + 1 :]
    parsed = OverridesParser.create().parse_overrides(given)
    return {override.key_or_group: override.value() for override in parsed}


def launched(checkout):
    """(run folder, what Hydra reads, the folder stood in) of the one training."""
    folder, arguments = stages(checkout)["verl-gdpo run"]
    return Path(arguments[arguments.index("--run-dir") + 1]), overrides(arguments), folder


def test_help_from_anywhere(checkout):
    (checkout.parent / "bin" / "train").symlink_to(checkout / "run_tool_rl.sh")
    for script in ("../../repo/run_tool_rl.sh", "train", checkout / "run_tool_rl.sh"):
        done = call(checkout, "--help", script=script, hardware=None)
        assert (done.returncode, done.stderr) == (0, "")
        assert "./run.sh TASK [--resume [RUN_FOLDER]]" in done.stdout
        assert "Every number is in recipes/." in done.stdout and "pipefail" not in done.stdout
    assert stages(checkout) == {}


@pytest.mark.skipif(not shutil.which("dash"), reason="needs dash, which is sh on Debian")
@pytest.mark.parametrize(
    "script", ["run.sh", "run_tool_rl.sh", "run_demo.sh", "setup_env.sh", "tests/run.sh"]
)
def test_the_sh_of_debian_hands_over_to_bash(script, tmp_path):
    """A program of the name bash stands in, so that nothing is installed."""
    program(tmp_path / "bash", '#!/bin/sh\necho bash "$@"\n')
    done = subprocess.run(
        ["dash", REPO / script, "a b", "--help"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"bash {REPO / script} a b --help\n"


def test_every_stage_of_a_run(checkout):
    done = call(checkout, "estimator=grpo")
    assert (done.returncode, done.stderr) == (0, "")
    ran = stages(checkout)
    assert sorted(ran) == ["data_prep", "verl-gdpo run", "verl-gdpo summary"]
    _, arguments = ran["verl-gdpo run"]
    assert "--end-with-parent" in arguments
    (run,) = (checkout / "runs").iterdir()
    go_on = shlex.split(arguments[arguments.index("--go-on") + 1])
    assert go_on == [str(checkout / "run.sh"), "tool_rl", "--resume", str(run)]
    assert overrides(arguments) == {
        "task": "tool_rl",
        "hardware": "cpu",
        "data_dir": str(checkout / "data"),
        "actor_rollout_ref.model.path": str(checkout / "verl_gdpo" / "cpu" / "tool_rl_policy"),
        "estimator": "grpo",
        "run_dir": str(run),
    }
    assert arguments[arguments.index("--config-dir") + 1] == str(checkout / "recipes")
    assert ran["verl-gdpo summary"][1][-1] == str(run)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_set_up_that_fails_leaves_no_file(checkout, temporary):
    program(checkout / "setup_env.sh", "#!/bin/bash\nexit 3\n")
    assert call(checkout).returncode == 3
    assert not [*temporary.iterdir()]


def test_sigkill_in_the_set_up_leaves_no_process_and_no_file(checkout, temporary, tmp_path):
    """The script cannot do anything any more; `sleep` stands for pip."""
    started = tmp_path / "started"
    program(
        checkout / "setup_env.sh",
        f"#!/bin/bash\nsleep 600 &\necho $! >{started}.new\nmv {started}.new {started}\nwait\n",
    )
    script = subprocess.Popen([checkout / "run_tool_rl.sh", "hardware=cpu"])
    wait_for(started.exists)
    installing = int(started.read_text())
    script.kill()
    script.wait()
    wait_for(lambda: not is_alive(installing))
    assert not [*temporary.iterdir()]


def test_a_folder_for_temporary_files_that_is_not_there(checkout, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere/at all")
    done = call(checkout)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "cannot make a file in TMPDIR=/nowhere/at all; expected a folder that" in done.stderr
    assert "make it with mkdir -p, or unset TMPDIR" in done.stderr


def test_another_task(checkout):
    done = run_sh(checkout, "gsm8k", "hardware=cpu")
    assert (done.returncode, done.stderr) == (0, "")
    ran = stages(checkout)
    assert overrides(ran["verl-gdpo run"][1])["task"] == "gsm8k"
    assert ran["data_prep"][1][-3:] == ["--synthetic", "--out", f"{checkout}/data/gsm8k_tiny"]
    policy = ran["workshop.tiny_policy"][1][-4:]
    rows = f"{checkout}/data/gsm8k_tiny/train.parquet"
    assert policy == ["--data", rows, "--out", f"{checkout}/data/gsm8k_policy"]
    run_sh(checkout, "gsm8k", "hardware=cpu", "data_dir=für my data")
    ran, data = stages(checkout), checkout.parent / "deep" / "home" / "für my data"
    assert ran["data_prep"][1][-2:] == ["--out", f"{data}/gsm8k_tiny"]
    assert ran["workshop.tiny_policy"][1][-1] == f"{data}/gsm8k_policy"
    assert overrides(ran["verl-gdpo run"][1])["data_dir"] == str(data)
    *_, run = sorted((checkout / "runs").iterdir())
    assert run.name.startswith("gsm8k-")
    save_checkpoint(run / "checkpoints", 3)
    assert run_sh(checkout, "gsm8k", "hardware=cpu", "--resume").returncode == 0
    assert launched(checkout)[0] == run
    assert "nothing to resume" in call(checkout, "--resume").stderr


def test_a_task_with_a_model_of_the_hub_needs_no_tiny_policy(checkout):
    shutil.copytree(
        REPO / "recipes" / "task_on_hardware", checkout / "recipes" / "task_on_hardware"
    )
    (checkout / "recipes" / "task" / "constraints.yaml").touch()
    for given, model in (
        ([], "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (["actor_rollout_ref.model.path=m"], None),  # a folder
        (["++actor_rollout_ref.model.path=org/My-1.5_model"], "org/My-1.5_model"),
        (["actor_rollout_ref.model.path='org/it'"], None),  # verl downloads it
        (["actor_rollout_ref.model.path=/a/b"], None),
    ):
        assert run_sh(checkout, "constraints", "hardware=cpu", *given).returncode == 0
        ran = stages(checkout)
        assert "data_prep" in ran and "workshop.tiny_policy" not in ran
        assert downloaded(ran) == model
        trained = overrides(ran["verl-gdpo run"][1]).get("actor_rollout_ref.model.path")
        assert trained == (given[0].split("=")[1].strip("'") if given else None)
    run_sh(checkout, "gsm8k", "hardware=cpu")
    ran = stages(checkout)
    assert "workshop.tiny_policy" in ran and downloaded(ran) is None


def downloaded(ran):
    """The name of the model that is downloaded, without the weights of other frameworks."""
    if "hf download" not in ran:
        return None
    arguments = ran["hf download"][1]
    command = arguments.index("download")
    assert {"*.json", "*.safetensors"} < {*arguments[command + 2 :]}
    return arguments[command + 1]


def test_a_folder_whose_name_looks_like_a_model_is_not_downloaded(checkout):
    (checkout.parent / "deep" / "home" / "models" / "mine").mkdir(parents=True)
    call(checkout, "actor_rollout_ref.model.path=models/mine")
    assert downloaded(stages(checkout)) is None


def test_a_model_that_cannot_be_downloaded_ends_the_start(checkout):
    python = checkout / "venv-cpu" / "bin" / "python"
    program(python, PYTHON + '[[ $* != *"hf download"* ]] || exit 1\n')
    done = call(checkout, "actor_rollout_ref.model.path=org/other")
    assert done.returncode == 1
    assert "org/other" in done.stdout and "actor_rollout_ref.model.path=FOLDER" in done.stdout
    assert "verl-gdpo run" not in stages(checkout)


def test_the_run_that_holds_the_folder_is_named(checkout):
    """Before its files are looked at: they say nothing of a run that goes on."""
    run = checkout / "runs" / "tool_rl-1"
    save_checkpoint(run / "checkpoints", 3)
    with locked(run / "lock", "the run folder"):
        for arguments in (["--resume", str(run)], [f"run_dir={run}"]):
            done = call(checkout, *arguments)
            assert done.returncode == 2
            assert f"{run} is in use by process {os.getpid()}, which is alive" in done.stderr
            assert "rm -r" not in done.stderr
    assert stages(checkout) == {}
    assert call(checkout, "--resume", str(run)).returncode == 0  # the file stays, and is no lock


def test_a_folder_that_ray_cannot_write_is_named_before_anything_is_made(checkout, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    file = checkout.parent / "file"
    file.touch()
    monkeypatch.setenv("HOME", str(file))
    done = call(checkout)
    assert done.returncode == 2
    assert f"run.sh: {file}/.ray: Ray writes a token into this folder of HOME" in done.stderr
    assert stages(checkout) == {}
    assert call(checkout, "+ray_kwargs.ray_init.address=auto").returncode == 0
    monkeypatch.setenv("HOME", str(checkout))
    monkeypatch.setenv("RAY_TMPDIR", str(file))
    done = call(checkout)
    assert done.returncode == 2
    assert f"run.sh: {file}/ray: Ray keeps its sessions in this folder" in done.stderr


def test_a_task_that_is_not_there(checkout):
    for arguments in (["gsm9k"], ["hardware=cpu"], []):
        done = run_sh(checkout, *arguments)
        assert done.returncode == 2 and "expected a task first" in done.stderr
    assert "one of: gsm8k tool_rl, or another with" in run_sh(checkout, "gsm9k").stderr
    assert stages(checkout) == {}


def test_the_runs_exit_code(checkout, monkeypatch):
    monkeypatch.setenv("LAUNCH_EXIT", "137")
    assert call(checkout).returncode == 137
    assert "verl-gdpo summary" not in stages(checkout)


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_what_is_overridden_is_not_made(checkout, prefix):
    made = {"data_prep", "workshop.tiny_policy"}
    own_model = prefix + "actor_rollout_ref.model.path=m"
    run_sh(checkout, "gsm8k", "hardware=cpu", *(prefix + key for key in OWN_DATA), own_model)
    assert not made & {*stages(checkout)}
    partly = (prefix + OWN_DATA[0], "+text='a data.val_files=b'")
    run_sh(checkout, "gsm8k", "hardware=cpu", *partly)
    assert made <= {*stages(checkout)}
    # a policy has rows, also where the user trains on others
    run_sh(checkout, "gsm8k", "hardware=cpu", *OWN_DATA)
    assert made <= {*stages(checkout)}
    call(checkout, own_model)
    assert launched(checkout)[1]["actor_rollout_ref.model.path"] == "m"


def test_paths_are_relative_to_where_the_user_stands(checkout):
    home = checkout.parent / "deep" / "home"
    save_checkpoint(home / "run" / "checkpoints", 3)
    call(checkout, "data.train_files=my.parquet", "--resume", "run/")
    ran = stages(checkout)
    assert ran["data_prep"][0] == checkout
    assert ran["verl-gdpo run"][0] == home
    arguments = ran["verl-gdpo run"][1]
    assert overrides(arguments)["data.train_files"] == "my.parquet"
    assert overrides(arguments)["run_dir"] == str(home / "run")


GO_ON = r"""
[[ $* != *verl_gdpo.tools.run.resume* ]] || printf '%s\0' --config-dir stored 'a b' "${@:4}"
"""


def recorded(checkout, name, *recipes):
    """A run with manifests and a checkpoint, up to which its tenth start trained."""
    run = checkout / "runs" / name
    saved = run / "checkpoints" / "global_step_3"
    chosen = dict(one.split(": ") for one in recipes)
    for number, checkpoint, of_start in (
        (2, "", {"hardware": "1gpu"}),
        (10, "", chosen),
        (11, str(saved), {"hardware": "8gpu", "attention": "flash_attn"}),
    ):
        made = write(run, StartManifest(now(), checkpoint=checkpoint, recipes=of_start), "")
        made.rename(made.with_name(str(number)))
    save_checkpoint(saved.parent, 3)  # after the starts, whose times are whole seconds
    for hardware in ("cpu", "gpu"):
        program(checkout / f"venv-{hardware}" / "bin" / "python", PYTHON + GO_ON)
    return run


def test_a_resume_takes_the_configuration_of_the_run(checkout):
    run = recorded(checkout, "tool_rl-1", "hardware: cpu", "estimator: grpo")
    more = (
        "trainer.save_freq=1",
        "--allow-change",
        "algorithm",
        "--allow-change",
        "data.val_files",
    )
    done = call(checkout, "--resume", *more, hardware=None)
    assert (done.returncode, done.stderr) == (0, "")
    ran = stages(checkout)
    assert sorted(ran) == ["verl-gdpo run", "verl-gdpo summary", "verl_gdpo.tools.run.resume"]
    allowed = "++allow_change=[algorithm,data.val_files]"
    given = ["hardware=cpu", "task=tool_rl", "trainer.save_freq=1", allowed]
    assert ran["verl_gdpo.tools.run.resume"][1][2:] == [str(run), *given]
    _, arguments = ran["verl-gdpo run"]
    command = arguments[arguments.index("--") + 1 :]
    assert command[1:] == [
        *("-m", "verl.trainer.main_ppo", "--config-dir", "stored", "a b"),
        *given,
    ]


def test_a_resume_on_gpus_leaves_the_recipes_to_the_run(checkout):
    finds(checkout, f"hardware=8gpu trainer.n_gpus_per_node=4 {TOKENS}=5")
    recorded(checkout, "tool_rl-1", "hardware: 8gpu", "attention: flash_attn")
    says_what_it_gets(checkout)
    # a full disk left it empty, which is no obstacle
    tracker = checkout / "runs/tool_rl-1/checkpoints/latest_checkpointed_iteration.txt"
    tracker.write_text("")
    done = call(checkout, "--resume", hardware=None)
    assert (done.returncode, done.stderr) == (0, "gpu flash-attn\n")
    ran = stages(checkout)
    given = ran["verl_gdpo.tools.run.resume"][1][3:]
    assert given == ["hardware=8gpu", "task=tool_rl"]
    assert downloaded(ran) is None  # the earlier start has


def test_a_run_without_a_manifest_goes_on_with_the_command(checkout):
    run = recorded(checkout, "tool_rl-1")
    shutil.rmtree(run / "starts")
    done = call(checkout, "--resume", "estimator=grpo")
    assert "no start is recorded that trained up to the checkpoint of" in done.stdout
    assert launched(checkout)[1]["estimator"] == "grpo"


@pytest.mark.parametrize("name", ["a,b=c", "d (e", "it's", "#f", "ä ö", "[g]", "{h: i}", "$j"])
def test_a_folder_of_any_name_is_resumed(checkout, name):
    run = checkout.parent / "deep" / "home" / name
    save_checkpoint(run / "checkpoints", 3)
    assert call(checkout, "--resume", name).returncode == 0
    folder, given, _ = launched(checkout)
    assert folder == run
    assert given["run_dir"] == str(run)


def test_options_of_the_check_reach_it(checkout):
    call(checkout, "--allow-flat", "--seconds", "300", "estimator=grpo")
    arguments = stages(checkout)["verl-gdpo run"][1]
    told = [text for text in arguments if text.startswith("--check-option")]
    assert told == ["--check-option=--allow-flat", "--check-option=--seconds=300"]


def test_the_latest_run_is_resumed(checkout):
    for day in (3, 1, 2):
        (checkout / "runs" / f"tool_rl-2026-01-0{day}").mkdir(parents=True)
    latest = checkout / "runs" / "tool_rl-2026-01-03"
    save_checkpoint(latest / "checkpoints", 3)
    for more in ([], ["estimator=grpo"], ["--time-limit", "1"]):
        call(checkout, "--resume", *more)
        assert launched(checkout)[0] == latest


def test_a_run_without_a_whole_checkpoint_is_not_resumed(checkout):
    run = checkout / "runs" / "tool_rl-1"
    saved = save_checkpoint(run / "checkpoints", 3)
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    for text, said in {
        "4": f"write its step: echo 3 > {tracker}, and give the same command again",
        "3": f"{tracker} says '3', but {saved}/actor is missing. No checkpoint there is whole",
        "": f"{tracker} says '', but {run}/checkpoints has no whole checkpoint",
        None: f"nothing to resume in '{run}': no checkpoint",
    }.items():
        if text is None:
            tracker.unlink()
        else:
            tracker.write_text(text)
        done = call(checkout, "--resume", "estimator=grpo")
        assert done.returncode == 2 and said in done.stderr
        anew = f"start anew, without --resume: {checkout}/run.sh tool_rl estimator=grpo"
        assert anew in done.stderr
        assert stages(checkout) == {}
        if text == "4":
            shutil.rmtree(saved / "actor")


def test_two_starts_in_one_second_have_two_folders(checkout):
    program(checkout.parent / "bin" / "date", "#!/bin/sh\necho 2026-01-01_00-00-00\n")
    folders = []
    for _ in range(3):
        call(checkout)
        folders.append(launched(checkout)[0])
    assert [folder.name.rpartition("_")[2] for folder in folders] == [
        "00-00-00",
        "00-00-00-2",
        "00-00-00-3",
    ]
    assert sorted(folders) == sorted((checkout / "runs").iterdir())


def test_a_folder_of_the_users_choice(checkout):
    assert call(checkout, "run_dir=deep/mine").returncode == 0
    mine = checkout.parent / "deep" / "home" / "deep" / "mine"
    folder, given, _ = launched(checkout)
    assert folder == mine and given["run_dir"] == str(mine)
    assert not (checkout / "runs").exists()
    (mine / "metrics").mkdir(parents=True)
    done = call(checkout, "run_dir=deep/mine")
    assert done.returncode == 2 and "--resume" not in done.stderr
    assert "choose another, or start anew in it after: rm -r deep/mine\n" in done.stderr
    save_checkpoint(mine / "checkpoints", 3)
    done = call(checkout, "run_dir=deep/mine")
    assert done.returncode == 2 and "go on with it: --resume deep/mine" in done.stderr


@pytest.mark.parametrize(
    ("found", "given", "wanted", "expected"),
    [
        ("hardware=cpu", [], "", {"hardware": "cpu"}),
        (f"hardware=1gpu {TOKENS}=5", [], "", {"hardware": "1gpu", TOKENS: 5}),
        (
            f"hardware=8gpu trainer.n_gpus_per_node=4 {TOKENS}=5",
            [f"{TOKENS}=7", "trainer.n_gpus_per_node=2"],
            "2",
            {"hardware": "8gpu", TOKENS: 7, "trainer.n_gpus_per_node": 2},
        ),
        (
            f"hardware=8gpu trainer.n_gpus_per_node=4 {TOKENS}=5",
            ["++trainer.n_gpus_per_node=2"],
            "2",
            {"hardware": "8gpu", TOKENS: 5, "trainer.n_gpus_per_node": 2},
        ),
        (f"hardware=8gpu {TOKENS}=5", ["hardware=1gpu"], "1", {"hardware": "1gpu", TOKENS: 5}),
    ],
)
def test_the_recipes_fit_the_gpus_that_are_wanted(checkout, found, given, wanted, expected):
    shutil.copy(REPO / "recipes/task/tool_rl.yaml", checkout / "recipes/task")
    code = f"import sys; print({found!r}); print(*sys.argv[1:], sep='|', file=sys.stderr)"
    (checkout / "verl_gdpo" / "tools" / "run" / "gpus.py").write_text(code)
    done = call(checkout, *given, hardware=None)
    assert done.returncode == 0
    assert done.stderr.startswith(f"tool_rl|{wanted}|task=tool_rl")
    assert f"hardware={expected['hardware']}\n" in done.stdout
    ran = stages(checkout)
    arguments = ran["verl-gdpo run"][1]
    read = overrides(arguments)
    assert {key: read[key] for key in expected} == expected
    given = arguments[arguments.index("train") + 1 :]
    assert len(given) == len({override.split("=")[0] for override in given})
    model = None if expected["hardware"] == "cpu" else "Qwen/Qwen2.5-1.5B-Instruct"
    assert downloaded(ran) == model


def test_an_active_environment_with_verl_is_used(checkout):
    """As in verl's image, or with a checkout of verl's main branch: nothing is installed."""
    finds(checkout, "hardware=8gpu")
    says_what_it_gets(checkout)
    there = checkout.parent / "bin" / "python3"
    code = f"""case $* in
  *importlib.metadata*)
    echo "{checkout}/my venv/bin/python"; echo "verl 0.10.0.dev0, vllm 0.24.0, verl-gdpo 0.1.0" ;;
  *) exec /usr/bin/env -u PATH {sys.executable} "$@" ;;
esac"""
    program(there, f"#!/bin/bash\n{code}\n")
    program(
        checkout / "my venv" / "bin" / "python",
        f"""#!/bin/bash
if [[ $1 == *gpus.py ]]; then exec {sys.executable} "$@"; fi
{PYTHON.removeprefix("#!/bin/bash")}""",
    )
    done = call(checkout, hardware=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert "as it is: verl 0.10.0.dev0, vllm 0.24.0, verl-gdpo 0.1.0\n" in done.stdout


# as nvidia-smi prints it; tests/tools/run/test_gpus.py has other machines
A100 = "NVIDIA A100-SXM4-80GB, 81920"
# the module itself, on a machine that has no device of its own
LOOK = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gpus", "{REPO}/verl_gdpo/tools/run/gpus.py")
gpus = sys.modules["gpus"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpus)
gpus._has_device = lambda: False
sys.exit(gpus.main(sys.argv[1:]))
"""


def on_machine(checkout, lines):
    rows = "\n".join(f"{i}, GPU-{i}a0b, {line}" for i, line in enumerate(lines))
    text = f"cat <<'EOF'\n{rows or 'No devices were found'}\nEOF\nexit {0 if rows else 6}"
    program(checkout.parent / "bin" / "nvidia-smi", f"#!/bin/sh\n{text}\n")
    (checkout / "verl_gdpo" / "tools" / "run" / "gpus.py").write_text(LOOK)


def test_who_names_the_hardware_goes_on_with_what_its_recipe_has(checkout):
    on_machine(checkout, ["NVIDIA GB10, [N/A]"])
    done = call(checkout, hardware=None)
    assert done.returncode == 2 and stages(checkout) == {}
    assert "GPU NVIDIA GB10: nvidia-smi says memory [N/A]" in done.stderr
    assert "give hardware=1gpu or hardware=8gpu" in done.stderr
    assert call(checkout, hardware="1gpu").returncode == 0
    _, arguments = stages(checkout)["verl-gdpo run"]
    assert overrides(arguments)["hardware"] == "1gpu" and TOKENS not in overrides(arguments)
    # with places of its own, each configuration would be composed anew
    given = arguments[arguments.index("train") + 1 :]
    config = composed(*(one for one in given if not one.startswith(("run_dir=", "data_dir="))))
    validate_config(config, need_reference_policy(config), need_critic(config))


FOUND = "hydra.searchpath=[pkg://echo_task.recipes]"


def call_echo(checkout, *arguments):
    """A start of a task whose recipe is in another distribution."""
    return run_sh(checkout, "echo", *OWN_DATA, *arguments)


def test_a_recipe_of_another_distribution(checkout):
    policy = "actor_rollout_ref.model.path=policy"
    assert "or another with hydra.searchpath=[FOLDER]" in call_echo(checkout, policy).stderr
    assert call_echo(checkout, FOUND, policy).returncode == 0
    run, given, _ = launched(checkout)
    assert (given["task"], given["hydra.searchpath"]) == ("echo", ["pkg://echo_task.recipes"])
    save_checkpoint(run / "checkpoints", 3)
    assert call_echo(checkout, "--resume", policy).returncode == 0


def test_a_task_whose_size_is_not_known(checkout):
    on_machine(checkout, [A100])
    done = call_echo(checkout, FOUND)
    assert done.returncode == 2 and stages(checkout) == {}
    assert re.search(
        r"this machine: the size of the model of task=echo is not known here. Give "
        r"actor_rollout_ref.actor.ppo_max_token_len_per_gpu=N .* and "
        r"actor_rollout_ref.rollout.gpu_memory_utilization=X ",
        done.stderr,
    )
    keys = {TOKENS: 9000, "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4}
    first, second = (f"{key}={value}" for key, value in keys.items())
    assert call_echo(checkout, FOUND, first).returncode == 2
    assert call_echo(checkout, FOUND, first, second).returncode == 0
    _, given, _ = launched(checkout)
    assert given.items() >= {**keys, "hardware": "1gpu"}.items()


def test_a_resume_is_not_asked_for_sizes(checkout):
    on_machine(checkout, [A100])
    recorded(checkout, "echo-1", "hardware: 1gpu")
    done = call_echo(checkout, "--resume")
    assert done.returncode == 0, done.stderr


def test_what_a_recipe_needs_is_installed_for_it_alone(checkout):
    says_what_it_gets(checkout)
    finds(checkout, "hardware=1gpu")
    assert call(checkout, hardware=None).stderr == "gpu\n"
    assert call(checkout, "attention=flash_attn", hardware=None).stderr == "gpu flash-attn\n"
    finds(checkout, "hardware=cpu")
    assert call(checkout).stderr == "cpu\n"
    assert call(checkout, "rollout_engine=vllm_cpu").stderr == "cpu vllm\n"
    recorded(checkout, "tool_rl-1", "hardware: cpu", "rollout_engine: vllm_cpu")
    run = checkout / "runs" / "tool_rl-1"
    assert call(checkout, "--resume", run, hardware=None).stderr == "cpu vllm\n"


@pytest.mark.parametrize("script", ["run_tool_rl.sh", "setup_env.sh", "tests/run.sh"])
def test_another_system_is_told_what_is_needed(checkout, script):
    program(checkout.parent / "bin" / "uname", "#!/bin/sh\necho Darwin\n")
    (checkout / "tests").mkdir()
    for name in ("setup_env.sh", "tests/run.sh"):
        shutil.copy(REPO / name, checkout / name)
    done = call(checkout, script=checkout / script, hardware=None)
    assert done.returncode == 2
    assert "needs Linux, or WSL2 on Windows; this is Darwin" in done.stderr
    assert stages(checkout) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "nowhere"], "nothing to resume in 'nowhere'"),
        (["hardware=9gpu"], "no recipes/hardware/9gpu.yaml"),
        (["hardware=8gpu"], "hardware=8gpu, but there is no GPU here"),
        (["steps"], "expected key=value"),
        (["--steps=3"], "expected key=value"),
        (["--time-limit"], "--time-limit needs seconds"),
        (["--allow-change"], "--allow-change needs a key"),
        (["--seconds"], "--seconds needs a number"),
    ],
)
def test_refused_arguments(checkout, arguments, message):
    done = call(checkout, *arguments, hardware=None)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert stages(checkout) == {}
