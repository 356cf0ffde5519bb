"""The launcher: exit codes, progress, and that no process survives the end of a run."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_gdpo.run import folder as run_folder
from verl_gdpo.run import processes
from verl_gdpo.run.console import (
    Progress,
    failure_report,
    faults_from_outside,
    stop_report,
)
from verl_gdpo.run.findings import findings
from verl_gdpo.run.folder import read_metrics
from verl_gdpo.run.heartbeat import START, Heartbeat
from verl_gdpo.run.launch import End, _check_of, _Ends, launch, main
from verl_gdpo.run.processes import MARK, BusyError, locked

# a driver that starts a child in a session of its own, one whose environment cannot be read, as
# that of Ray's agents, who write their title over it, and one with neither; then it does `{body}`
DRIVER = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [
    subprocess.Popen(sleep, start_new_session=True),
    subprocess.Popen(sleep, env={{}}),
    subprocess.Popen(["env", "-i", "setsid", *sleep]),
]
open("{folder}/new", "w").write(" ".join(str(child.pid) for child in children))
os.rename("{folder}/new", "{folder}/children")
{body}
"""


def driver(folder, body):
    return [sys.executable, "-c", DRIVER.format(folder=folder, body=body)]


def children_of(folder):
    """Those of the driver that are alive."""
    pids = [int(pid) for pid in (folder / "children").read_text().split()]
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),  # as by the kernel when memory runs out
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
from multiprocessing import get_context, resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=8)
lock = get_context("spawn").Lock()
print(segment.name, "sem." + lock._semlock.name.strip("/"), flush=True)
both = [resource_tracker._resource_tracker._pid, os.getpid()]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


# a keeper that looks often, and writes when it has found both
LOOKS = """
import sys
from verl_gdpo.run import processes
processes.SEGMENTS_SECONDS, look = 0.0, processes._mapped_by
def looked(found):
    if len(found := look(found)) == 2:
        open("{looked}", "w").write("1")
    return found
processes._mapped_by = looked
sys.exit(processes.main())
"""


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        (
            "while time.sleep(.1) or not open('{looked}').read(): pass\n"
            "for pid in both: os.kill(pid, signal.SIGKILL)",
            137,
        ),
        ("time.sleep(600)", 124),
    ],
    ids=["ends by itself", "is ended"],
)
def test_shared_memory_is_removed(tmp_path, monkeypatch, end, exit_code):
    looked = tmp_path / "looked"
    looked.write_text("")
    keeper = [sys.executable, "-c", LOOKS.format(looked=looked)]
    monkeypatch.setattr(processes, "keeper", lambda run, command: [*keeper, str(run), *command])
    command = driver(tmp_path, SEGMENTS + end.format(looked=looked))
    limit = 4 if exit_code == 124 else 60
    done = launch(command, tmp_path / "run", quiet=True, time_limit=limit)
    assert done.exit_code == exit_code, (tmp_path / "run" / "train.log").read_text()
    names = (tmp_path / "run" / "train.log").read_text().split()[:2]
    assert len(names) == 2 and not [name for name in names if os.path.exists(f"/dev/shm/{name}")]


@pytest.mark.parametrize("exit_code", [0, 5])
def test_rays_session_is_removed_and_its_logs_are_kept_after_a_failure(
    tmp_path, monkeypatch, exit_code
):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    body = (
        "from pathlib import Path;"
        "session = Path(os.environ['RAY_TMPDIR'], 'ray', f'session_now_{os.getpid()}');"
        "(session / 'logs').mkdir(parents=True); (session / 'logs' / 'out').write_text('said');"
        f"sys.exit({exit_code})"
    )
    end = launch(driver(tmp_path, body), tmp_path / "run", quiet=True)
    assert end.exit_code == exit_code
    assert not [*(tmp_path / "tmp" / "ray").iterdir()]
    kept = [path.read_text() for path in (tmp_path / "run").glob("ray_logs/session_now_*/out")]
    assert kept == ["said"] * bool(exit_code)


@pytest.mark.parametrize("given", [None, "3"])
def test_transfer_queue_is_told_how_many_cores_there_are(tmp_path, monkeypatch, given):
    """Else it warns at each call on a machine that has fewer than 8."""
    monkeypatch.delenv("TQ_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("TQ_NUM_THREADS", given)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 2)
    launch(driver(tmp_path, "print(os.environ['TQ_NUM_THREADS'])"), tmp_path, quiet=True)
    assert (tmp_path / "train.log").read_text() == f"{given or 2}\n"


def test_time_limit(tmp_path):
    """Of a driver that will not listen."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert launch(driver(tmp_path, body), tmp_path, time_limit=2) == End(124, "time limit")
    assert not children_of(tmp_path)


def start(folder, body="time.sleep(600)", before=(), command=None, **streams):
    """The launcher as a process, with the driver's child started."""
    folder.mkdir(exist_ok=True)
    launcher = [
        *before,
        sys.executable,
        "-m",
        "verl_gdpo.run.launch",
        "--run-dir",
        str(folder),
        "--",
    ]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
    process = subprocess.Popen([*launcher, *(command or driver(folder, body))], **streams)
    wait_for(lambda: (folder / "children").exists())
    return process


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stopped(tmp_path, body, *arguments):
    """A launcher whose driver runs until SIGTERM, and what it then prints."""
    command = ["--go-on", "./run.sh T --resume R", *arguments, "--", *driver(tmp_path, body)]
    launcher = [sys.executable, "-m", "verl_gdpo.run.launch", "--run-dir", str(tmp_path), *command]
    process = subprocess.Popen(
        launcher, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not arguments:
        wait_for(lambda: (tmp_path / "children").exists())
        process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=60)[0].splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_every_process(tmp_path, number):
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.send_signal(number)
    said, _ = process.communicate(timeout=15)
    assert process.returncode == 128 + number
    assert not children_of(tmp_path)
    nothing = "there is no checkpoint yet, so start anew with the same command"
    assert said.decode() == f"stopped before the first step; {nothing}\n"


def with_steps(folder, *steps, saved):
    (folder / "metrics").mkdir()
    (folder / "metrics" / "1.jsonl").write_text("".join(map(step_line, steps)))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(saved))


def test_a_run_that_is_stopped_says_how_it_goes_on_and_shows_no_log(tmp_path):
    with_steps(tmp_path, 6, 7, saved=5)
    body = "print('ValueError: no', flush=True); time.sleep(600)"
    go_on = "the last checkpoint is of step 5; go on with: ./run.sh T --resume R"
    assert stopped(tmp_path, body)[-1:] == [f"stopped at step 7; {go_on}"]
    *steps, said = stopped(tmp_path, body, "--time-limit", "3")
    assert said == f"time limit: stopped at step 7; {go_on}"
    assert "ValueError" not in "".join(steps)


def test_a_tracker_that_holds_no_number_is_quoted(tmp_path):
    """As a full disk or a hand may leave it; the run still ends with its one line."""
    with_steps(tmp_path, 7, saved="5 (old)")
    assert "the last checkpoint is of step 5 (old); go on" in stop_report(tmp_path, "stopped")


def test_a_folder_that_is_deleted_ends_the_run(tmp_path):
    run = tmp_path / "run"
    process = start(run, stderr=subprocess.PIPE)
    shutil.move(run, tmp_path / "elsewhere")
    errors = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 1
    assert errors.startswith(f"the run's folder {run} was deleted or moved")
    assert not children_of(tmp_path / "elsewhere")
    assert not run.exists()


@pytest.mark.parametrize(
    ("machine", "stacks"), [("platform.node()", "in <module>"), ("'far'", "It runs on far.")]
)
def test_a_trainer_that_gives_no_sign_of_life_ends_the_run(tmp_path, machine, stacks):
    """It writes its heartbeat once, and holds the interpreter from then on.

    The process of its number is another one if it runs on another machine.
    """
    body = (
        "from pathlib import Path; from verl_gdpo import stacks; stacks.register();"
        "import platform; from verl_gdpo.run.heartbeat import Heartbeat;"
        f"beat = Heartbeat(os.getpid(), 'gen', 3, 5, limit=1, machine={machine});"
        f"beat.write(Path({str(tmp_path)!r}));"
        "import re; re.match('(a*)*b', 'a' * 60)"
    )
    process = start(tmp_path, body, stderr=subprocess.PIPE)
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert "has given no sign of life for 1 s, in the phase 'gen' of step 3" in errors
    text = (tmp_path / "hang.txt").read_text()
    assert stacks in text and ("in <module>" in text) == (stacks == "in <module>")
    assert not (tmp_path / "heartbeat.json").exists()
    assert not children_of(tmp_path)


def test_a_hang_is_the_reason_and_not_what_came_of_it(tmp_path):
    """Its trainer may have to be killed, and Ray then says that an actor died."""
    body = (
        f"open({str(tmp_path / 'hang.txt')!r}, 'w').write('HangError: no progress\\n\\nstacks');"
        "raise RuntimeError('an actor died')"
    )
    process = start(tmp_path, body, stderr=subprocess.PIPE)
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert errors == f"HangError: no progress\n(whole log: {tmp_path / 'train.log'})\n"


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
    said = "the launcher of this run is dead; ended python"
    wait_for(lambda: said in (tmp_path / "run" / "train.log").read_text())


def keepers_of(process):
    children = psutil.Process(process.pid).children()
    return [child for child in children if "verl_gdpo.run.processes" in child.cmdline()]


def test_a_run_whose_keeper_is_killed_ends(tmp_path):
    process = start(tmp_path, stderr=subprocess.PIPE)
    (keeper,) = keepers_of(process)
    assert len(children_of(tmp_path)) == 3
    keeper.kill()
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 137 and "was ended by SIGKILL" in errors
    assert not children_of(tmp_path)


def test_what_a_dead_run_left_is_named_and_ended_at_the_next_start(tmp_path, capsys):
    process = start(tmp_path)
    for each in (*keepers_of(process), process):
        each.kill()
    process.wait()
    assert len(children_of(tmp_path)) == 3
    assert launch([sys.executable, "-c", ""], tmp_path) == End(0, "finished")
    assert "ended processes of an earlier start of this run: python" in capsys.readouterr().out
    assert not children_of(tmp_path)


def test_a_copy_of_a_living_run_is_another_run(tmp_path):
    process = start(tmp_path / "run")
    try:
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert launch([sys.executable, "-c", ""], tmp_path / "copy", quiet=True).exit_code == 0
        assert len(children_of(tmp_path / "run")) == 3
    finally:
        process.terminate()
        process.wait(15)


def test_a_folder_belongs_to_one_run(tmp_path):
    process = start(tmp_path)
    (tmp_path / "metrics" / "1.jsonl").write_text("of the first")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    command = [
        sys.executable,
        "-m",
        "verl_gdpo.run.launch",
        "--run-dir",
        str(tmp_path),
        "--",
        "true",
    ]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2
    assert f"{tmp_path} is in use by process {process.pid}, which is alive" in second.stderr
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    process.kill()
    process.wait()
    wait_for(lambda: not children_of(tmp_path))
    assert subprocess.run(command).returncode == 0


def test_what_cannot_start_is_said_without_a_traceback(tmp_path):
    (tmp_path / "file").touch()
    for folder, command in ((tmp_path / "run", "/nowhere"), (tmp_path / "file" / "run", "true")):
        launcher = [
            sys.executable,
            "-m",
            "verl_gdpo.run.launch",
            "--run-dir",
            folder,
            "--",
            command,
        ]
        done = subprocess.run(launcher, capture_output=True, text=True)
        assert done.returncode == 2
        assert re.fullmatch(r"verl_gdpo.run.launch: \[Errno \d+\] .*\n", done.stderr)


def test_the_run_ends_with_the_process_that_started_it(tmp_path):
    # a shell that is killed, as a script by the kernel: nothing in it can end what it started
    command = f"{sys.executable} -m verl_gdpo.run.launch --run-dir {tmp_path} --end-with-parent -- "
    shell = subprocess.Popen(
        ["bash", "-c", command + '"$@" & wait', "bash", *driver(tmp_path, "time.sleep(600)")]
    )
    wait_for(lambda: (tmp_path / "children").exists())
    shell.kill()
    shell.wait()
    wait_for(lambda: not children_of(tmp_path))
    with locked(tmp_path / "lock", "the run folder", wait=True):  # by then the launcher has ended
        pass


HOLDER = """
import sys
from pathlib import Path
from verl_gdpo.run.processes import locked
with locked(Path(sys.argv[1]), "it", wait=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLDER, path], **pipes)


def test_a_lock_is_refused_or_waited_for(tmp_path):
    path = tmp_path / "lock"
    with hold(path) as holder:
        assert holder.stdout.readline() == b"held\n"
        said = f"it is in use by process {holder.pid}"
        with pytest.raises(BusyError, match=said), locked(path, "it"):
            pass
        waiter = hold(path)
        assert waiter.stderr.readline().decode() == f"{said}; waiting for it\n"
        holder.kill()
        assert waiter.communicate()[0] == b"held\n"


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with (
        pytest.raises(OSError, match=r"lock: its file system has no locks \(No locks available\)"),
        locked(tmp_path / "lock", "it"),
    ):
        pass


def test_other_processes_are_left_alone(tmp_path):
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, MARK: "somebody else"},
    )
    try:
        launch(driver(tmp_path, "sys.exit(0)"), tmp_path, quiet=True)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def step_line(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def logging_driver(folder, *lines):
    """A driver that logs these lines and ends well."""
    text = "".join(lines)
    return driver(
        folder,
        f"open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write({text!r}); time.sleep(.5); "
        f"open('{folder}/ended', 'w'); sys.exit(0)",
    )


def test_progress_lines(tmp_path, capsys):
    line = step_line(1, **{"gdpo/format/mean": 0.5, "gdpo/format/std": 0.1, "actor/lr": 1e-6})
    more = {"actor/kl_loss": 0.00123, "response_length/mean": 27.4, "timing_s/step": 9.87}
    validation = {"val-aux/x/format/mean@1": 0.25}
    lines = [line, step_line(2, **more, **validation, **{"gdpo/format/mean": 0.6})]
    launch(logging_driver(tmp_path, step_line(0, **validation), *lines), tmp_path)
    shown = [text.split("] ")[1] for text in capsys.readouterr().out.splitlines()]
    assert shown == [
        "step    0  validation  format 0.250",
        "step    1  format 0.500",
        "step    2  format 0.600  KL 0.0012  27 tokens  9.9 s",
        "step    2  validation  format 0.250",
    ]


def test_a_sign_of_life_says_what_the_run_does(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("verl_gdpo.run.console.HEARTBEAT_SECONDS", -1.0)
    progress = Progress(tmp_path, quiet=False)
    progress.show()
    Heartbeat(1, START, None, 0, limit=9.0).write(tmp_path)
    progress.show()
    Heartbeat(1, "gen", 3, 48, limit=9.0).write(tmp_path)
    progress.show()
    shown = [text.split("] ")[1] for text in capsys.readouterr().out.splitlines()]
    starting = "starting Ray, the policy and its servers ..."
    assert shown == [
        starting,
        starting,
        "step 3: gen, 48 samples finished since the start ...",
    ]


def test_time_left(tmp_path, capsys, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("verl_gdpo.run.console.time.monotonic", lambda: now)
    (tmp_path / "train.log").write_text("Total training steps: 7\n")  # of an earlier start
    (tmp_path / "metrics").mkdir()
    progress = Progress(tmp_path, quiet=False)
    with (tmp_path / "train.log").open("a") as log:
        log.write("(TaskRunnerV1 pid=1) INFO:Total training steps: 2000\n")
    for step in (0, 1, 4, 1990, 2000):
        now = 1000.0 + 10 * step
        with (tmp_path / "metrics" / "1.jsonl").open("a") as metrics:
            metrics.write(step_line(step, **{"gdpo/format/mean": 0.5, "gdpo/format/std": 0.1}))
        progress.show()
    ends = [line.split("0.500")[1] for line in capsys.readouterr().out.splitlines()]
    left = ["", "5 h 33 min", "5 h 33 min", "2 min", ""]
    assert ends == [text and f"  {text} left of 2000 steps" for text in left]


def test_findings_are_shown_once(tmp_path, capsys):
    progress = Progress(tmp_path, quiet=False)
    (tmp_path / "metrics").mkdir()
    with (tmp_path / "metrics" / "1.jsonl").open("a") as metrics:
        for step in range(1, 400):
            metrics.write(step_line(step, **{"response/aborted_ratio": 0.9 * (step > 7)}))
            metrics.flush()
            progress.show()
    shown = capsys.readouterr().out.splitlines()
    (place,) = [k for k, line in enumerate(shown) if "FINDING" in line]
    assert "step   12" in shown[place - 1]  # the fifth of them
    assert "90% of the responses are empty" in shown[place]


LOST_OR_REPEATED = {1: (332, 333, 334, 335), 2: (331,)}


def log_steps(run, start, steps, progress):
    (run / "metrics").mkdir(exist_ok=True)
    with (run / "metrics" / f"{start}.jsonl").open("a") as file:
        for step in steps:
            values = {f"perf/{name}": 1.0 for name in range(50)}
            values["response/aborted_ratio"] = 0.9 if 100 < step < 120 else 0.0
            # above the level of the first steps, which only the first start has
            values["actor/grad_norm"] = 0.3 if step < 550 else 30.0
            values["actor/pg_clipfrac"] = 0.9 if start == 1 and 310 < step < 340 else 0.01
            # at the last four steps that are lost, and at the one before them when repeated
            broken = step in LOST_OR_REPEATED[start]
            values["actor/kl_loss"] = 0.4 if broken else 0.001
            file.write(step_line(step, **values))
            if step % 5 == 0 or step == 331:
                file.flush()
                progress.show()


def test_the_log_finds_what_the_summary_finds(tmp_path, capsys):
    """600 steps; the first start got to 335, and the second goes on after the checkpoint at 300."""
    log_steps(tmp_path, 1, range(1, 336), Progress(tmp_path, quiet=False))
    resumed = Progress(tmp_path, quiet=False)
    first = [line for line in capsys.readouterr().out.splitlines() if "FINDING" in line]
    log_steps(tmp_path, 2, range(301, 601), resumed)
    second = [line for line in capsys.readouterr().out.splitlines() if "FINDING" in line]
    assert ["90% of the responses" in line for line in first] == [True, False]  # and clipped tokens
    (gradient,) = second  # what the first start has said is not said again
    assert "the gradient norm is 30; at the start it was 0.3" in gradient
    in_all = findings(read_metrics(tmp_path))
    assert resumed.watch.findings() == in_all
    assert [(one.topic, one.is_over) for one in in_all] == [("gradient", False), ("aborted", True)]
    assert resumed.earlier == {}


def test_a_resume_reads_each_line_of_the_run_once(tmp_path, monkeypatch):
    log_steps(tmp_path, 1, range(1, 41), Progress(tmp_path, quiet=True))
    read, step_of = [], run_folder._step_of
    monkeypatch.setattr(run_folder, "_step_of", lambda line: read.append(line) or step_of(line))
    resumed = Progress(tmp_path, quiet=False)
    log_steps(tmp_path, 2, range(31, 61), resumed)
    assert len(read) == 40 + 30


def test_a_run_whose_steps_are_not_known_shows_no_time_left(tmp_path, capsys):
    lines = [step_line(step, **{"gdpo/format/mean": 0.5}) for step in (1, 2)]
    launch(logging_driver(tmp_path, *lines), tmp_path)
    assert " left" not in capsys.readouterr().out


CHECKED = "import sys, time; time.sleep({seconds}); print({text!r}, flush=True); sys.exit({code})"


def checked(folder, body, code, seconds=0.3):
    """How a launch ends whose check ends with this exit code."""
    check = [sys.executable, "-c", CHECKED.format(seconds=seconds, text="looked", code=code)]
    return launch(driver(folder, body), folder, check=check, quiet=True)


def test_a_check_runs_beside_the_driver(tmp_path, capfd):
    assert checked(tmp_path, "time.sleep(1.5); sys.exit(0)", 0).exit_code == 0
    assert capfd.readouterr().out == "looked\n"
    assert (tmp_path / "train.log").read_text() == ""


def test_a_check_that_fails_ends_the_run(tmp_path, capfd):
    end = checked(tmp_path, "time.sleep(600)", 1)
    assert (end.exit_code, end.reason) == (1, "refused")
    assert not children_of(tmp_path)
    assert capfd.readouterr().out == "looked\n"


def test_a_check_that_fails_after_the_driver_explains_it(tmp_path):
    assert checked(tmp_path, "sys.exit(3)", 1, seconds=1).reason == "refused"
    assert checked(tmp_path, "sys.exit(3)", 0).exit_code == 3


def test_a_check_that_dies_says_so_and_leaves_the_log(tmp_path, monkeypatch, capfd):
    """It calls the user's reward function, which can end the interpreter."""
    dies = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr("verl_gdpo.run.launch._check_of", lambda command, options: dies)
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["launch", "--check", "--run-dir", str(run), "sleep", "600"])
    assert main() == 1
    assert "the check itself ended, with exit code 137" in capfd.readouterr().err
    assert (run / "train.log").exists()


def test_a_disk_that_is_away_for_a_moment_ends_no_run(tmp_path, monkeypatch):
    stat, away = Path.stat, []

    def away_once(path, **options):
        if path == tmp_path and len(away) < 3:
            away.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **options)

    ends = _Ends(tmp_path, float("inf"), None)
    monkeypatch.setattr(Path, "stat", away_once)
    for _ in range(4):
        ends.raise_if_due()
    assert len(away) == 3


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


def test_a_refused_run_leaves_nothing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", "/none"]
    launcher = [sys.executable, "-m", "verl_gdpo.run.launch", "--check", "--run-dir", str(run)]
    done = subprocess.run([*launcher, "--", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "check: " in done.stderr and "whole log" not in done.stderr
    assert not run.exists()


def test_a_refused_run_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").touch()
    refuse = [sys.executable, "-c", "raise SystemExit(1)"]
    monkeypatch.setattr("verl_gdpo.run.launch._check_of", lambda command, options: refuse)
    arguments = ["--check", "--run-dir", str(tmp_path), "--", "sleep", "600"]
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    assert main() == 1
    assert (tmp_path / "notes.txt").exists()


def test_the_check_gets_its_options(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("verl_gdpo.run.launch._check_of", lambda *given: asked.append(given) or [])
    options = ["--check", "--check-option=--seconds=300", "--check-option=--allow-flat"]
    command = [sys.executable, "-c", "", "a=1"]
    monkeypatch.setattr(sys, "argv", ["launch", *options, "--run-dir", str(tmp_path), *command])
    assert main() == 0
    assert asked == [(command, ["--seconds=300", "--allow-flat"])]
    monkeypatch.undo()
    told = _check_of(["python", "-m", "verl.trainer.main_ppo", "a=1"], ["--allow-flat"])
    assert told == ["python", "-m", "verl_gdpo", "check", "--brief", "--allow-flat", "a=1"]


def test_no_line_of_metrics_ends_a_run(tmp_path, capsys):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "notes.jsonl").write_text("mine\n")
    lines = [
        step_line(1, **{"gdpo/format/mean": 0.5, "comment": "a string"}),
        "{\n",
        "[]\n",
        '{"step": 1}\n',
        step_line(2, **{"gdpo/format/mean": 0.75}),
    ]
    assert launch(logging_driver(tmp_path, *lines), tmp_path).exit_code == 0
    assert (tmp_path / "ended").exists()
    shown = capsys.readouterr().out
    assert "step    1  format 0.500" in shown and "step    2  format 0.750" in shown
    for number in (2, 3, 4):
        assert f"1.jsonl, line {number} left out" in shown


def test_no_mishap_of_the_display_ends_a_run(tmp_path, capsys, monkeypatch):
    def fail(metrics):
        raise RuntimeError("a bug")

    monkeypatch.setattr("verl_gdpo.run.folder.training_rewards", fail)
    assert launch(logging_driver(tmp_path, step_line(1), step_line(2)), tmp_path).exit_code == 0
    assert (tmp_path / "ended").exists()
    shown = capsys.readouterr().out
    assert shown.count("no progress is shown from here on: RuntimeError('a bug')") == 1


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = logging_driver(tmp_path, step_line(1))
    process = start(tmp_path, command=command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == 0
    assert (tmp_path / "ended").exists()


def test_a_resumed_run_shows_its_own_steps_alone(tmp_path, capsys):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "1.jsonl").write_text(step_line(3) + step_line(4))
    launch(logging_driver(tmp_path, step_line(4), step_line(5)), tmp_path)
    shown = capsys.readouterr().out
    assert [step for step in range(7) if f"step    {step}  " in shown] == [4, 5]


def test_why_a_run_failed(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "(worker) ValueError: inner\nTraceback:\n  x\nray.exceptions.RayTaskError(ValueError): a\n"
        "verl_gdpo.algorithm.samples.RewardError: reward 'a' is nan\n\nSet HYDRA_FULL_ERROR=1\n"
    )
    report = failure_report(tmp_path).splitlines()
    assert report[0] == "verl_gdpo.algorithm.samples.RewardError: reward 'a' is nan"
    assert str(log) in report[1]


@pytest.mark.parametrize(
    ("began", "message"),
    [
        ("Connected to Ray cluster.", "the head node of the Ray cluster does not answer any more"),
        ("Started a local Ray instance.", "Ray's gcs_server of this run does not answer any more"),
    ],
)
def test_a_ray_whose_server_is_gone(tmp_path, began, message):
    """Ray ends the driver itself, without an exception."""
    earlier = "INFO worker.py:2038 -- Started a local Ray instance.\n"
    (tmp_path / "train.log").write_text(
        f"{earlier}INFO worker.py:2038 -- {began}\n(worker) ValueError: inner\n"
        "[2026-11-23 13:06:06,701 E 28110 30003] rpc_client.h:204: Failed "
        "to connect to GCS within 60 seconds. GCS may have been killed.\n"
    )
    said, _ = failure_report(tmp_path, since=len(earlier)).splitlines()
    assert said.startswith(message)


def test_why_a_run_failed_is_of_this_start_and_no_command_to_the_terminal(tmp_path):
    (tmp_path / "train.log").write_text("ValueError: of an earlier start\n")
    body = r"print('\x1b[2J gone'); sys.exit(1)"
    process = start(tmp_path, body, stderr=subprocess.PIPE)
    lines = process.communicate(timeout=30)[1].decode().splitlines()
    assert lines == [r"\x1b[2J gone", f"(whole log: {tmp_path / 'train.log'})"]


def test_a_driver_that_is_killed(tmp_path):
    process = start(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", stderr=subprocess.PIPE)
    errors = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 137
    assert "the training process was ended by SIGKILL" in errors.splitlines()[0]


def test_a_disk_that_is_full(tmp_path):
    """RLIMIT_FSIZE stands for it: as on a full disk a write raises OSError, in the log too."""

    def no_file_above_64_kb():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    body = "[print('x' * 1000, flush=True) for _ in range(100)]"
    process = start(tmp_path, body, stderr=subprocess.PIPE, preexec_fn=no_file_above_64_kb)
    errors = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 1
    assert f"{tmp_path} cannot be written: [Errno 27]" in errors.splitlines()[0]


def test_other_ends_have_no_fault_from_outside(tmp_path):
    for exit_code in (1, 2, 124, 130, 143, -15, 255):
        assert faults_from_outside(tmp_path, exit_code) == []
