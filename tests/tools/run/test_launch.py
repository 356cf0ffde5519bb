"""The launcher: exit codes, and that no process survives the end of a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from launched import IMPATIENT, children_of, driver, launcher, start, with_steps
from processes import is_alive, wait_for

from verl_gdpo.tools.run import processes
from verl_gdpo.tools.run.launch import launch, main
from verl_gdpo.tools.run.processes import locked
from verl_gdpo.tools.run.starts import starts_of


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
    ],
)
def test_exit_code_and_log_of_the_command(tmp_path, end, exit_code):
    body = f"print('hello', flush=True); {end}"
    assert launch(driver(tmp_path, body), tmp_path, quiet=True).exit_code == exit_code
    assert (tmp_path / "train.log").read_text() == "hello\n"
    assert not children_of(tmp_path)


def test_the_folder_for_temporary_files_is_the_runs_own(tmp_path, monkeypatch):
    """Ray and the compiler stay where other runs look for them."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for variable in ("RAY_TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    body = (
        "import json, tempfile; tempfile.mkstemp();"
        "print(json.dumps([tempfile.gettempdir(), *map(os.environ.get, ('RAY_TMPDIR',"
        " 'TORCHINDUCTOR_CACHE_DIR'))]))"
    )
    assert launch(driver(tmp_path, body), tmp_path / "run", quiet=True).exit_code == 0
    own, ray, compiler = json.loads((tmp_path / "run" / "train.log").read_text())
    assert os.path.dirname(own) == ray == os.path.dirname(compiler) == str(tmp_path)
    assert not os.path.exists(own)


# a segment and a semaphore, which stay when a process and Python's tracker of them are killed
SEGMENTS = """
from multiprocessing import get_context, shared_memory
segment = shared_memory.SharedMemory(create=True, size=8)
lock = get_context("spawn").Lock()
print(segment.name, "sem." + lock._semlock.name.strip("/"), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


@pytest.mark.parametrize(
    ("end", "expected", "limit"),
    [
        # the launcher looks every 10 s who shares what
        pytest.param(
            *("time.sleep(14); os.kill(os.getpid(), signal.SIGKILL)", (137, "failed"), 60),
            marks=pytest.mark.slow,
        ),
        ("time.sleep(600)", (124, "time limit"), 4),
    ],
    ids=["is killed", "is ended"],
)
def test_shared_memory_is_removed(tmp_path, end, expected, limit):
    """Of a driver that memory ran out for, and of one that will not listen."""
    done = launch(driver(tmp_path, SEGMENTS + end), tmp_path, quiet=True, time_limit=limit)
    log = (tmp_path / "train.log").read_text()
    assert (done.exit_code, done.reason) == expected, log
    assert not children_of(tmp_path)
    names = log.split()[:2]
    assert len(names) == 2 and not [name for name in names if os.path.exists(f"/dev/shm/{name}")]


def stopped(tmp_path, body, *arguments):
    """A launcher whose driver runs until SIGTERM, and what it then prints."""
    words = ["--go-on", "./run.sh T --resume R", *arguments, "--", *driver(tmp_path, body)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(launcher(tmp_path, *words), **streams)
    if not arguments:
        wait_for(lambda: (tmp_path / "children").exists())
        process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=60)[0].splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_every_process(tmp_path, number):
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.send_signal(number)
    output, _ = process.communicate(timeout=15)
    assert process.returncode == 128 + number
    assert not children_of(tmp_path)
    assert output.decode() == f"stopped at step 0; {tmp_path}/checkpoints has no checkpoint yet\n"


def test_a_run_that_is_stopped_says_how_it_goes_on_and_shows_no_log(tmp_path):
    with_steps(tmp_path, 6, 7, saved=5)
    body = "print('ValueError: no', flush=True); time.sleep(600)"
    go_on = "go on after global_step_5 with: ./run.sh T --resume R"
    assert stopped(tmp_path, body)[-1:] == [f"stopped at step 7; {go_on}"]
    *steps, last = stopped(tmp_path, body, "--time-limit", "3")
    assert last == f"time limit at step 7; {go_on}"
    assert "ValueError" not in "".join(steps)


def test_nohup_is_obeyed(tmp_path):
    process = start(tmp_path, "time.sleep(1)", before=("nohup",))
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0


def test_a_killed_launcher_takes_the_run_with_it(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start(tmp_path / "run", env={**os.environ, "TMPDIR": str(temporary)})
    assert [*temporary.iterdir()]
    process.kill()
    process.wait()
    wait_for(lambda: not children_of(tmp_path / "run"))
    wait_for(lambda: not [*temporary.iterdir()])


def keepers_of(process):
    children = psutil.Process(process.pid).children()
    return [child for child in children if "verl_gdpo.tools.run.processes" in child.cmdline()]


def test_a_run_whose_keeper_is_killed_ends(tmp_path):
    temporary, run = tmp_path / "temporary", tmp_path / "run"
    others = temporary / "vg_1_of_another"
    others.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = start(run, stderr=subprocess.PIPE, env=environment)
    (keeper,) = keepers_of(process)
    assert len(children_of(run)) == 3 and len([*temporary.iterdir()]) == 2
    keeper.kill()
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 137 and "was ended by SIGKILL" in errors
    assert not children_of(run)
    assert [*temporary.iterdir()] == [others]


def test_the_driver_dies_with_launcher_and_keeper(tmp_path):
    """Ray then ends its own processes."""
    process = start(tmp_path)
    (keeper,) = keepers_of(process)
    (driver_process,) = keeper.children()
    for each in (process, keeper):
        each.kill()
    process.wait()
    wait_for(lambda: not is_alive(driver_process.pid))
    for pid in children_of(tmp_path):  # of this driver, which are no Ray
        os.kill(pid, signal.SIGKILL)


def test_a_folder_belongs_to_one_run(tmp_path):
    process = start(tmp_path)
    (tmp_path / "metrics" / "1.jsonl").write_text("of the first")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    command = launcher(tmp_path, "--", "true")
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2
    assert f"{tmp_path} is in use by process {process.pid}, which is alive" in second.stderr
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    process.kill()
    process.wait()
    wait_for(lambda: not children_of(tmp_path))
    assert subprocess.run(command).returncode == 0


# --- a folder that is taken away from a run that goes on ------------------------------------------

# it records its start as verl's driver does, and keeps the file of its metrics open as verl does
LOGS = """
import json
from pathlib import Path
from verl_gdpo.tools.run import starts
def log(step):
    line = json.dumps({{"step": step, "data": {{"timing_s/update_actor": 1.0}}}})
    metrics.write(line.encode() + b"\\n")
trainer = {{"logger": ["file"], "hang_minutes": 0.01}}
starts.write(Path({run!r}), starts.here({{"trainer": trainer}}), "")
metrics = open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0)
log(1)
while os.path.exists({run!r}):
    time.sleep(0.05)
os.makedirs("{run}/rollouts")
for step in range(2, 12):
    time.sleep(0.3)
    log(step)
{end}
"""


def bereft(folder, take_away, end):
    """The launcher of a run whose folder is taken away after its first step."""
    run = folder / "run"
    run.mkdir()
    with_steps(run, saved=1)
    words = ["--go-on", "./run.sh T --resume R"]
    command = launcher(run, *words, "--", *driver(run, LOGS.format(run=str(run), end=end)))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **streams)
    for line in process.stdout:
        if "step    1" in line:
            break
    take_away(run)
    return process


def renamed(run):
    run.rename(run.with_name("moved"))


def test_a_run_whose_folder_is_renamed_goes_on(tmp_path, monkeypatch):
    """It takes six times as long as the limit of a hang."""
    monkeypatch.setattr("launched.LAUNCHER", ["-c", IMPATIENT])
    process = bereft(tmp_path, renamed, "sys.exit(0)")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    gone = f"WARNING: the run folder {tmp_path}/run is gone: it is now {tmp_path}/moved. The train"
    assert output.count(gone) == 1
    assert "step   11" in output
    assert "why: finished" in (tmp_path / "moved" / "starts" / "1" / "end.yaml").read_text()
    assert os.listdir(tmp_path / "run") == ["rollouts"]


@pytest.mark.slow
def test_a_run_that_is_stopped_after_its_folder_was_renamed(tmp_path):
    process = bereft(tmp_path, renamed, "time.sleep(600)")
    for line in process.stdout:
        if "step   11" in line:
            break
    process.send_signal(signal.SIGINT)
    first, second = process.communicate(timeout=60)[0].splitlines()
    last = f"stopped at step 11; the last checkpoint is {tmp_path}/moved/checkpoints/global_step_1."
    assert first.startswith(last) and first.endswith("Go on with: ./run.sh T --resume R")
    command = first.partition("Bring the parts of the run together: ")[2].partition(". Go on")[0]
    assert second.startswith(f"the run folder {tmp_path}/run is gone: it is now {tmp_path}/moved.")
    assert process.returncode == 130
    subprocess.run(command, shell=True, check=True)
    assert {"checkpoints", "rollouts", "train.log"} <= {*os.listdir(tmp_path / "run")}
    assert not (tmp_path / "moved").exists()


@pytest.mark.slow
def test_a_run_whose_folder_is_deleted_says_why_it_failed(tmp_path, monkeypatch):
    """And before that it goes on, although no step of it can be seen."""
    monkeypatch.setattr("launched.LAUNCHER", ["-c", IMPATIENT])
    process = bereft(tmp_path, shutil.rmtree, "raise ValueError('the reason')")
    output = process.communicate(timeout=60)[0]
    *_, reason, gone = output.splitlines()
    assert process.returncode == 1
    assert reason == "ValueError: the reason"
    assert gone.startswith(f"the run folder {tmp_path}/run is gone: it was deleted.")
    assert "Traceback" not in output


def test_each_start_has_metrics_of_its_own(tmp_path):
    """Of a command without a `run_dir`, whose logger empties its file at each start."""
    body = "open(os.environ['VERL_FILE_LOGGER_PATH'], 'wb').write(b'{}'); sys.exit(0)"
    for _ in range(2):
        launch(driver(tmp_path, body), tmp_path, quiet=True)
    metrics = sorted((tmp_path / "metrics").iterdir())
    assert [file.name for file in metrics] == ["1.jsonl", "2.jsonl"]
    assert all(file.read_bytes() == b"{}" for file in metrics)


# two trainings of one command, each of which logs for longer than the limit of a hang
TRAINS_TWICE = """
import json
from pathlib import Path
from verl_gdpo.tools.run import starts
from verl_gdpo.tools.run_folder.folder import keep_earlier_metrics
trainer = {{"logger": ["file"], "hang_minutes": 0.01}}
for is_recorded in {recorded}:
    keep_earlier_metrics()
    if is_recorded:
        starts.write(Path({run!r}), starts.here({{"trainer": trainer}}), "")
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0) as metrics:
        for step in range(1, 9):
            time.sleep(0.3)
            line = json.dumps({{"step": step, "data": {{"timing_s/update_actor": 1.0}}}})
            metrics.write(line.encode() + b"\\n")
"""


@pytest.mark.parametrize("second_is_recorded", [True, False])
def test_two_trainings_of_one_command(tmp_path, monkeypatch, second_is_recorded):
    """Neither loses its metrics, and the second one is watched in its own file."""
    monkeypatch.setattr("launched.LAUNCHER", ["-c", IMPATIENT])
    body = TRAINS_TWICE.format(run=str(tmp_path), recorded=[True, second_is_recorded])
    done = subprocess.run(
        launcher(tmp_path, "--", *driver(tmp_path, body)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in ("1.jsonl", "2.jsonl"):
        assert (tmp_path / "metrics" / name).read_bytes().count(b"\n") == 8
    assert done.stdout.count("step    5") == 2
    ends = [one.end.get("exit_code") for one in starts_of(tmp_path)]
    assert ends == ([None, 0] if second_is_recorded else [None])


@pytest.mark.parametrize("has_ended", [True, False])
def test_what_a_script_does_after_its_training_is_no_hang(tmp_path, monkeypatch, has_ended):
    """As an evaluation, which logs no steps. A training that does not return is one."""
    monkeypatch.setattr("launched.LAUNCHER", ["-c", IMPATIENT])
    body = TRAINS_TWICE.format(run=str(tmp_path), recorded=[True])
    if has_ended:
        body += f"starts.ended(Path({str(tmp_path)!r}), 'finished')\n"
    body += "time.sleep(5)\n"
    done = subprocess.run(
        launcher(tmp_path, "--", *driver(tmp_path, body)), capture_output=True, text=True
    )
    assert (done.returncode == 0) == has_ended, done.stderr
    assert ("HangError" in done.stderr) != has_ended


@pytest.mark.parametrize("name", ["VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"])
def test_a_place_of_the_users_for_metrics_is_not_put_aside_in_silence(
    tmp_path, monkeypatch, capfd, name
):
    monkeypatch.setenv(name, "mine")
    assert main(["--run-dir", str(tmp_path), "--", "true"]) == 0
    said = capfd.readouterr().out.splitlines()
    where = f"{tmp_path}/metrics"
    assert [line for line in said if name in line] == [
        f"verl-gdpo run: {name}=mine has no effect here: verl's file logger writes into {where}"
    ]


def test_what_cannot_start_is_said(tmp_path):
    (tmp_path / "file").touch()
    for folder, exit_code, why in [
        (tmp_path / "run", 127, r"FileNotFoundError: .*'/nowhere'"),
        (tmp_path / "file" / "run", 2, r"verl-gdpo run: \[Errno 20\] "),
    ]:
        words = launcher(folder, "--", "/nowhere")
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == exit_code and re.match(why, done.stderr)


def test_the_run_ends_with_the_process_that_started_it(tmp_path):
    # a shell that is killed, as a script by the kernel: nothing in it can end what it started
    command = f"{sys.executable} -m verl_gdpo run --run-dir {tmp_path} --end-with-parent -- "
    shell = subprocess.Popen(
        ["bash", "-c", command + '"$@" & wait', "bash", *driver(tmp_path, "time.sleep(600)")]
    )
    wait_for(lambda: (tmp_path / "children").exists())
    shell.kill()
    shell.wait()
    wait_for(lambda: not children_of(tmp_path))
    with locked(tmp_path / "lock", "the run folder", wait=True):  # by then the launcher has ended
        pass


def test_other_processes_are_left_alone(tmp_path):
    """Also if the same process has started them."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        launch(driver(tmp_path, "sys.exit(0)"), tmp_path, quiet=True)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_why_a_run_ended_is_said_if_a_process_survives(tmp_path, monkeypatch, capfd):
    """As one that waits for a dead file server does."""

    def survives(find):
        if (tmp_path / "children").exists():
            raise RuntimeError("these processes of the run survive SIGKILL: [7]")
        return []

    monkeypatch.setattr(processes, "end", survives)
    try:
        end = launch(driver(tmp_path, "sys.exit(3)"), tmp_path)
    finally:
        for pid in children_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
    assert (end.exit_code, end.reason) == (3, "failed")
    assert "survive SIGKILL: [7]" in capfd.readouterr().out
