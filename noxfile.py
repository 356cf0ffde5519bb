"""Tests that need an environment of their own: `nox`, or `nox -s trl` and the like.

PIP_FIND_LINKS=FOLDER names wheels to take first: that of torch without CUDA spares gigabytes.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import nox

TESTS = ("tests/test_legacy_trainer.py", "tests/test_other_trainers.py")
V1_TESTS = ("tests/test_separate_async.py", "tests/test_verl_seams.py")
# these versions set no bounds: they need numpy 1, and names that transformers 5 lacks
BOUNDS = ("transformers>=4.57,<5", "pyarrow>=19,<21")
SESSIONS = {
    "0.7.1": (BOUNDS, TESTS),
    "0.8.0": (BOUNDS, TESTS),
    "0.9.0": ((), TESTS + V1_TESTS),
}

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"


def install(session: nox.Session, *packages: str) -> None:
    folder = os.environ.get("PIP_FIND_LINKS")  # which uv does not read by itself
    links = ("--find-links", folder) if folder else ()
    session.install(*links, "torch==2.13.0")
    session.install(*links, *packages, "pytest>=8,<10")


def verl_session(version: str, bounds: tuple[str, ...], tests: tuple[str, ...]) -> None:
    @nox.session(name=f"verl-{version}")
    def test(session: nox.Session) -> None:
        """A version of verl other than the pinned one."""
        install(session, f"verl=={version}", *bounds, "-e", ".")
        env = {"VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin", "EXPECTED_VERL": version}
        session.run("pytest", *tests, *session.posargs, env=env)


for version, (bounds, tests) in SESSIONS.items():
    verl_session(version, bounds, tests)


@nox.session
def faults(session: nox.Session) -> None:
    """Workers killed, disks filled, runs resumed: more than the tests have time for."""
    install(session, "-e", ".[cpu]")
    session.run("pytest", "tests/faults.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def trl(session: nox.Session) -> None:
    """The dialect `trl` against TRL's own method, which pytest does not collect by itself."""
    install(session, "trl==1.16.0")
    # TRL's imports warn, and this project's tests take warnings for errors
    command = ("pytest", "-W", "ignore", "tests/trl_dialect.py", *session.posargs)
    session.run(*command, env={"PYTHONPATH": "."})


@nox.session(default=False)
def wheel(session: nox.Session) -> None:
    """The wheel alone, in an empty folder: data, a policy, `check` and a training of two steps."""
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
    policy = ("-m", "verl_gdpo.cpu.warm_start", "--steps", "20", "--out", "data/tiny_policy")
    session.run("python", *policy, env=env)
    config = ("hardware=cpu", "trainer.total_training_steps=2", "trainer.val_before_train=False")
    session.run("verl-gdpo", "check", *config, env=env)
    recipes = (session.run("verl-gdpo", "recipes", silent=True) or "").strip()
    command = ("python", "-m", "verl.trainer.main_ppo", "--config-dir", recipes)
    session.run(
        *("python", "-m", "verl_gdpo.run.launch", "--run-dir", "runs/first", "--", *command),
        *("--config-name", "train", *config, "run_dir=runs/first"),
        env=env,
    )
    session.run("verl-gdpo", "summary", "runs/first")
    shutil.rmtree(made)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Each fault in the table of tests/mutants.py, made in a copy, is found by its test."""
    install(session, "verl==0.9.1", "-e", ".[dev]")
    session.run("pytest", "tests/mutants.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def mutmut(session: nox.Session) -> None:
    """Which changes between a dict of rewards and the advantage no test finds; some 15 minutes.

    At most one in twenty: most of those change nothing, others need a GPU or the text of a message.
    """
    install(session, "verl==0.9.1", "-e", ".[dev]", "mutmut==3.8.1")
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
    """`f = decorator(f)` at the end, because mutmut passes over functions that are decorated."""
    text, decorated = file.read_text(), re.compile(r"^@(torch\.no_grad\(\))\n(?=def (\w+))", re.M)
    calls = [f"{name} = {decorator}({name})\n" for decorator, name in decorated.findall(text)]
    file.write_text(decorated.sub("", text) + "\n" + "".join(calls))
