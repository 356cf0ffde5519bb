"""Tests that need their own environment: run `nox` for the default ones, or `nox -s NAME`.

pip installs, so its settings hold. The sessions start from the pins of requirements/, so they run
what `setup_env.sh cpu` makes; `wheel`, `trl` and `workspace` install something else on purpose.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nox

ROOT = Path(__file__).parent
LAST_PASSES = "tests/help/last_passes.py"
CPU_PINS = "requirements/cpu.txt"
VLLM_PINS = "requirements/cpu_vllm.txt"
BFCL_PINS = "requirements/bfcl.txt"
# torch for the CPU is the one package with two indexes, and only PyPI's brings the others
WITHOUT_HASH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

Session = Callable[[nox.Session], None]


def recorded(function: Session) -> Session:
    """Note the commit and the date of each whole pass, for `tests/run.sh` to print."""

    @functools.wraps(function)
    def run(session: nox.Session) -> None:
        before = clean_commit()
        function(session)
        if session.posargs or before is None or before != clean_commit():
            session.log("not noted as a pass: it had arguments, or files differ from the commit")
        else:
            command = [sys.executable, LAST_PASSES, function.__name__, before]
            subprocess.run(command, cwd=ROOT, check=True)

    return run


def clean_commit() -> str | None:
    """Return the commit, or None if a file differs from it (the file of passes may)."""
    done = [
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        for command in (
            ("status", "--porcelain", "--", ".", ":!tests/slow/last_passes.json"),
            ("rev-parse", "HEAD"),
        )
    ]
    clean = all(one.returncode == 0 for one in done) and not done[0].stdout
    return done[1].stdout.strip() if clean else None


def install(session: nox.Session) -> None:
    """Install what `setup_env.sh cpu dev` installs."""
    files = ("-r", CPU_PINS, "-r", "requirements/dev.txt", "-r", BFCL_PINS)
    session.install("--no-compile", "--require-hashes", "--no-deps", *files)
    session.install("--no-compile", "torch==2.13.0")
    session.install("--no-deps", "-e", ".")
    compile_all = ("python", "-m", "compileall", "-qq", "-j", "0", "-x", "/tests/")
    # on all cores; a package may hold files of another Python
    session.run(*compile_all, f"{session.virtualenv.location}/lib", success_codes=(0, 1))


@nox.session(default=False)
def pins(session: nox.Session) -> None:
    """Renews requirements/. Versions that fit stay; `nox -s pins -- --upgrade` takes new ones."""
    session.install("uv==0.13.9")
    cpu = compiled(session, "cpu", CPU_PINS)
    cpu = [(name, text) for name, text in cpu if not WITHOUT_HASH.match(name)]
    write_pins(CPU_PINS, cpu)
    # vLLM's build for CPUs names torch's, and asks for packages of pictures and sound
    overrides = Path(session.create_tmp()) / "overrides.txt"
    unused = ("torchvision", "torchaudio", "torchcodec")
    overrides.write_text(
        "torch==2.13.0\n" + "".join(f"{name}; sys_platform == 'never'\n" for name in unused)
    )
    options = ("--group", "cpu-vllm", "--override", str(overrides))
    vllm = compiled(session, "cpu", VLLM_PINS, *options)
    write_pins(VLLM_PINS, [(name, text) for name, text in vllm if not WITHOUT_HASH.match(name)])
    write_pins("requirements/gpu.txt", compiled(session, "gpu", "requirements/gpu.txt"))
    # beside one of the others, whose versions it takes
    dev = compiled(session, "dev", "requirements/dev.txt", "--constraint", CPU_PINS)
    others = {name for name, _ in cpu}
    dev = [(name, text) for name, text in dev if not (name in others or WITHOUT_HASH.match(name))]
    write_pins("requirements/dev.txt", dev)
    bfcl = compiled(session, "dev", BFCL_PINS, "--group", "bfcl", "--no-deps")
    write_pins(BFCL_PINS, [(name, text) for name, text in bfcl if name == "bfcl-eval"])


def compiled(session: nox.Session, extra: str, old: str, *options: str) -> list[tuple[str, str]]:
    """Return (name, lines) of each package of an extra, for Linux and Python 3.10 to 3.12."""
    made = Path(session.create_tmp()) / f"{extra}.txt"
    if (ROOT / old).exists():
        shutil.copy(ROOT / old, made)  # uv keeps its versions
    command = ("uv", "pip", "compile", "pyproject.toml", "--extra", extra, *options)
    session.run(
        *(*command, "--universal", "--python-version", "3.10", "--generate-hashes"),
        *("--no-annotate", "--no-header", "--output-file", str(made), *session.posargs),
        env={"UV_PYTHON_DOWNLOADS": "never"},
        silent=True,
    )
    entries = re.findall(r"^(\S+?)==(.*\n(?:    .*\n)*)", made.read_text(), re.M)
    return [(name, f"{name}=={rest}") for name, rest in entries]


def write_pins(file: str, pins: list[tuple[str, str]]) -> None:
    header = "# Exact versions for Python 3.10-3.12, with hashes. Made by `nox -s pins`.\n"
    (ROOT / file).write_text(header + "".join(text for _, text in pins))


@nox.session
@recorded
def verl(session: nox.Session) -> None:
    """Runs our tests of verl's inside on another verl, and prints which of its names remain.

    It is verl 0.9.0, or the first argument, such as the folder of a checkout: what pip takes. The
    other arguments go to pytest.
    """
    verl, *arguments = session.posargs or ["verl==0.9.0"]
    install(session)
    session.install(
        "--no-deps", "--force-reinstall", verl
    )  # it runs with the dependencies of 0.9.1
    session.run("python", "-W", "ignore", "tests/slow/verl_symbols.py")
    # a verl without V1 fails the files that import it, and runs the others
    tests = ("--continue-on-collection-errors", "tests/verl_hooks", "tests/test_plugin.py")
    session.run("pytest", "-m", "", *tests, *arguments, env={"OMP_NUM_THREADS": "1"})


@nox.session
@recorded
def slow(session: nox.Session) -> None:
    """Whole trainings, and long tests that rarely fail; `bash tests/run.sh` leaves them out."""
    install(session)
    files = ("tests/slow/trainings.py", "tests/slow/mixed_tasks.py", "tests/slow/merge.py")
    env = {"OMP_NUM_THREADS": "1"}
    session.run("pytest", *files, *session.posargs, env=env)
    session.run("pytest", "-m", "slow", *session.posargs, env=env)


@nox.session
@recorded
def faults(session: nox.Session) -> None:
    """Runs that fail, that hang, and that are resumed; too slow for the other tests."""
    install(session)
    tests = ("tests/slow/faults.py", "tests/slow/hangs.py", "tests/slow/resume.py")
    session.run("pytest", *tests, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
@recorded
def nodes(session: nox.Session) -> None:
    """Trains on two Ray nodes on this machine, and lets them die; too slow for the other tests."""
    install(session)
    session.run("pytest", "tests/slow/nodes.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
@recorded
def vllm(session: nox.Session) -> None:
    """Trains with real vLLM, without a GPU, in the environment of `./setup_env.sh cpu vllm`."""
    session.install("pytest>=8,<10", "-e", ".")
    command = ("pytest", "--noconftest", "tests/slow/vllm.py", *session.posargs)
    session.run(*command, env={"OMP_NUM_THREADS": "1"})


@nox.session
@recorded
def trainers(session: nox.Session) -> None:
    """Whole runs: the asynchronous trainers, tools, four ranks, other losses, LoRA."""
    install(session)
    env = {"OMP_NUM_THREADS": "1"}
    session.run("pytest", "-s", "tests/slow/trainers.py", *session.posargs, env=env)


@nox.session(default=False)
@recorded
def policy(session: nox.Session) -> None:
    """The policy in the package is what its command makes: 1,000 steps, some 4 minutes."""
    install(session)
    session.run("pytest", "tests/slow/shipped_policy.py", env={"OMP_NUM_THREADS": "1"})


@nox.session
@recorded
def experiment(session: nox.Session) -> None:
    """Trains two steps of `workshop/experiments/trainer` with verl."""
    install(session)
    session.run(
        "python", "-m", "pytest", "tests/slow/experiment_run.py", env={"OMP_NUM_THREADS": "1"}
    )


@nox.session
@recorded
def bfcl(session: nox.Session) -> None:
    """Plays all questions of BFCL-v3 with scripted answers: right, wrong, and none."""
    install(session)
    files = ("tests/slow/bfcl.py", "tests/slow/bfcl_dialogues.py")
    session.run("pytest", "-s", *files, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
@recorded
def trl(session: nox.Session) -> None:
    """Compares us with TRL's own code, without verl; pytest does not collect these tests itself."""
    session.install("torch==2.13.0")
    session.install("-e", ".[trl]", "trl==1.16.0", "pytest>=8,<10")
    # TRL's imports emit warnings, which are errors in this project's tests
    files = ("tests/slow/trl_dialect.py", "tests/slow/trl_example.py")
    # the fixtures of the other slow tests need more packages
    command = ("pytest", "-W", "ignore", "--noconftest", *files)
    session.run(*command, *session.posargs, env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"})


@nox.session
@recorded
def workspace(session: nox.Session) -> None:
    """Builds the W&B workspace of examples/ with W&B's own package, offline."""
    session.install("wandb-workspaces==0.4.13", "pytest>=8,<10")
    # as for `trl`
    command = ("pytest", "-W", "ignore", "--noconftest", "tests/slow/wandb_workspace_spec.py")
    session.run(*command, *session.posargs, env={"PYTHONPATH": "."})


@nox.session(default=False)
@recorded
def wheel(session: nox.Session) -> None:
    """Installs the wheel and, in an empty folder, makes rows and trains two steps."""
    # not `session.create_tmp()`: Ray's temporary files must not lie in a virtual environment
    made = Path(tempfile.mkdtemp(prefix="wheel-"))
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(made), ".", silent=True)
    (built,) = made.glob("*.whl")
    session.install("torch==2.13.0")
    session.install(f"{built}[cpu]")
    empty = made / "empty"
    empty.mkdir()
    session.chdir(empty)
    env = {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    session.run("verl-gdpo", "--version")
    rows = ("--synthetic", "64", "--out", "data/tool_rl_tiny")
    session.run("verl-gdpo", "data", "tool_rl", *rows)
    package = "import verl_gdpo; print(*verl_gdpo.__path__)"
    installed = (session.run("python", "-c", package, silent=True) or "").strip()
    shutil.copytree(Path(installed) / "cpu" / "tool_rl_policy", empty / "data" / "tool_rl_policy")
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
@recorded
def mutants(session: nox.Session) -> None:
    """Makes each fault of tests/help/mutants.py in a copy, where its test must find it."""
    install(session)
    session.run(
        "pytest", "tests/slow/try_mutants.py", *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )


@nox.session(default=False)
@recorded
def mutmut(session: nox.Session) -> None:
    """Finds changes of the code between rewards and advantages that no test notices (15 minutes).

    At most one change in twenty may be missed: most of these have no effect, others need a GPU or
    only change the text of a message.
    """
    install(session)
    session.install("mutmut==3.8.1")
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
