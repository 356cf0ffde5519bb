"""Tests that need their own environment: run `nox` for the default ones, or `nox -s NAME`.

PIP_FIND_LINKS=FOLDER names a folder of wheels to use first. A wheel of torch without CUDA saves
gigabytes.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import nox

SEAMS = ("legacy_trainer", "other_trainers", "separate_async", "v1_trainer")

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"


def install(session: nox.Session, *packages: str) -> None:
    folder = os.environ.get("PIP_FIND_LINKS")  # uv does not read it by itself
    links = ("--find-links", folder) if folder else ()
    session.install(*links, "torch==2.13.0")
    session.install(*links, *packages, "pytest>=8,<10")


@nox.session
def verl(session: nox.Session) -> None:
    """Runs our tests of verl's inside on another verl, and prints which of its names remain.

    It is verl 0.9.0, or the first argument, such as the folder of a checkout: what pip takes. The
    other arguments go to pytest.
    """
    verl, *arguments = session.posargs or ["verl==0.9.0"]
    install(session, "-e", ".")
    session.install(
        "--no-deps", "--force-reinstall", verl
    )  # it runs with the dependencies of 0.9.1
    session.run("python", "-W", "ignore", "tests/slow/verl_symbols.py")
    tests = (f"tests/verl_hooks/test_{name}.py" for name in SEAMS)
    # a verl without V1 fails two files, and runs the others
    session.run("pytest", "--continue-on-collection-errors", *tests, *arguments)


@nox.session
def faults(session: nox.Session) -> None:
    """Runs that fail, and are resumed; too slow for the other tests."""
    install(session, "-e", ".[cpu]")
    session.run(
        "pytest",
        "tests/slow/faults.py",
        "tests/slow/hangs.py",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session(default=False)
def policy(session: nox.Session) -> None:
    """The policy in the package is what its command makes: 1,000 steps, some 4 minutes."""
    install(session, "-e", ".[cpu]")
    session.run("pytest", "tests/slow/shipped_policy.py", env={"OMP_NUM_THREADS": "1"})


@nox.session
def experiment(session: nox.Session) -> None:
    """Trains two steps of `workshop/experiments/trainer` with verl."""
    install(session, "-e", ".[cpu]")
    session.run(
        "python", "-m", "pytest", "tests/slow/experiment_run.py", env={"OMP_NUM_THREADS": "1"}
    )


@nox.session
def trl(session: nox.Session) -> None:
    """Compares us with TRL's own code, without verl; pytest does not collect these tests itself."""
    install(session, "trl==1.16.0")
    # TRL's imports emit warnings, which are errors in this project's tests
    command = ("pytest", "-W", "ignore", "tests/slow/trl_dialect.py", "tests/slow/trl_example.py")
    session.run(*command, *session.posargs, env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"})


@nox.session
def workspace(session: nox.Session) -> None:
    """Builds the W&B workspace of examples/ with W&B's own package, offline."""
    session.install("wandb-workspaces==0.4.13", "pytest>=8,<10")
    command = ("pytest", "-W", "ignore", "tests/slow/wandb_workspace_spec.py")
    session.run(*command, *session.posargs, env={"PYTHONPATH": "."})


@nox.session(default=False)
def wheel(session: nox.Session) -> None:
    """Installs the wheel and, in an empty folder, makes data and a policy and trains two steps."""
    # not `session.create_tmp()`: Ray's temporary files must not lie in a virtual environment
    made = Path(tempfile.mkdtemp(prefix="wheel-"))
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(made), ".", silent=True)
    (built,) = made.glob("*.whl")
    install(session, f"{built}[cpu]")
    empty = made / "empty"
    empty.mkdir()
    session.chdir(empty)
    env = {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    session.run("verl-gdpo", "--version")
    rows = ("--synthetic", "64", "--size", "tiny", "--out", "data/tool_rl_tiny")
    session.run("verl-gdpo", "data", "tool_rl", *rows)
    policy = ("-m", "verl_gdpo.cpu.warm_start", "--steps", "20", "--out", "data/tool_rl_policy")
    session.run("python", *policy, env=env)
    config = ("hardware=cpu", "trainer.total_training_steps=2", "trainer.val_before_train=False")
    folder = (session.run("verl-gdpo", "recipes", silent=True) or "").strip()
    recipes = ("--config-dir", folder, "--config-name", "train")
    session.run("verl-gdpo", "check", *recipes, *config, env=env)
    session.run(
        *("python", "-m", "verl_gdpo.run.launch", "--run-dir", "runs/first", "--"),
        *("python", "-m", "verl.trainer.main_ppo", *recipes, *config, "run_dir=runs/first"),
        env=env,
    )
    session.run("verl-gdpo", "summary", "runs/first")
    shutil.rmtree(made)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Makes each fault of tests/help/mutants.py in a copy, where its test must find it."""
    install(session, "-e", ".[cpu,dev]")
    session.run(
        "pytest", "tests/slow/try_mutants.py", *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )


@nox.session(default=False)
def mutmut(session: nox.Session) -> None:
    """Finds changes of the code between rewards and advantages that no test notices (15 minutes).

    At most one change in twenty may be missed: most of these have no effect, others need a GPU or
    only change the text of a message.
    """
    install(session, "-e", ".[cpu,dev]", "mutmut==3.8.1")
    copy = Path(session.create_tmp()).resolve() / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    hidden = shutil.ignore_patterns(".*", "__pycache__", "data", "runs", "outputs", "*.egg-info")
    shutil.copytree(Path(__file__).parent, copy, ignore=hidden)
    with_decorators_below(copy / "verl_gdpo" / "advantage" / "equation.py")
    session.chdir(copy)
    session.run("mutmut", "run", *session.posargs, env={"OMP_NUM_THREADS": "1"})
    session.run("mutmut", "results")
    session.run("mutmut", "export-cicd-stats", silent=True)
    found = json.loads((copy / "mutants" / "mutmut-cicd-stats.json").read_text())
    missed = found["survived"] + found["no_tests"]
    session.log(f"{missed} of {found['total']} mutants were not found")
    if missed > found["total"] / 20:
        session.error(f"more than one in twenty: see `mutmut browse` in {copy}")


def with_decorators_below(file: Path) -> None:
    """Write decorators as `f = decorator(f)` at the end: mutmut skips decorated functions."""
    text, decorated = file.read_text(), re.compile(r"^@(torch\.no_grad\(\))\n(?=def (\w+))", re.M)
    calls = [f"{name} = {decorator}({name})\n" for decorator, name in decorated.findall(text)]
    file.write_text(decorated.sub("", text) + "\n" + "".join(calls))
