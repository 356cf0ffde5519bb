"""The fork server: a forked process behaves as one that a new interpreter runs."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from verl_gdpo.cpu import fork_server as server
from verl_gdpo.run.forking import WORKERS_INTERPRETER, fork_server, workers_too
from verl_gdpo.run.processes import MARK, end_run

VERL = [sys.executable, "-m", "verl.trainer.main_ppo"]
SHOW = """
import json, os, sys, warnings
import numpy, random
warnings.warn("from the script")
json.dump({
    "argv": sys.argv[1:], "main": __name__, "path": sys.path[0], "folder": os.getcwd(),
    "umask": os.umask(0), "environment": dict(os.environ), "read": sys.stdin.read(),
    "executable": sys.executable, "open": len(os.listdir("/proc/self/fd")),
}, sys.stdout)
json.dump({
    "id": os.getpid(), "parent": os.getppid(), "imported": [*sys.modules],
    "draws": [random.random(), numpy.random.random()],
}, open("own.json", "w"))
print("on stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module", autouse=True)
def not_in_the_background():
    """A background job ignores SIGINT, and so does what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "VERL_PLATFORM": "cpu", MARK: f"test:{uuid.uuid4().hex}"}


@pytest.fixture(scope="module")
def forked(environment, tmp_path_factory):
    """What takes the place of the interpreter, with a server behind it, and the server's log."""
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("ab") as file, fork_server(VERL, environment, file) as interpreter:
        yield interpreter, log
        end_run(environment[MARK])
    assert not os.path.exists(os.path.dirname(interpreter[-1]))


def start(interpreter, script, environment, *arguments, **options):
    return subprocess.Popen(
        [*interpreter, *arguments, *([str(script)] if script else [])],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.mark.parametrize("options", [[], ["-W", "ignore"]])
@pytest.mark.parametrize("as_module", [False, True])
def test_like_a_new_interpreter(forked, environment, tmp_path, as_module, options):
    (tmp_path / "show_all.py").write_text(SHOW)
    what = ["-m", "show_all"] if as_module else [str(tmp_path / "show_all.py")]
    environment = {**environment, "ONLY_HERE": "\udcff", "HOME": "/nowhere"}
    del environment["PATH"]

    def shown(interpreter):
        process = start(
            interpreter,
            None,
            environment,
            *options,
            *what,
            "a b",
            "",
            "ü",
            cwd=tmp_path,
            umask=0o27,
        )
        out, err = process.communicate("typed")
        own = json.loads((tmp_path / "own.json").read_text())
        return json.loads(out), own, err, process.returncode

    usual, usual_own, usual_err, usual_code = shown([sys.executable])
    ours, own, err, code = shown(forked[0])
    assert (ours, code) == (usual, usual_code)
    assert code == 7
    assert "on stderr" in err
    assert ("from the script" in err) == ("from the script" in usual_err) == (not options)
    # it was forked, from a process that has not imported what differs between processes
    assert own["parent"] != os.getpid() == usual_own["parent"]
    assert {"torch", "transformers", "tensordict"} <= {*own["imported"]}
    assert not {"verl", "ray", "transfer_queue"} & {*own["imported"]}
    again = shown(forked[0])[1]
    assert not {*own["draws"]} & {*again["draws"]}


def test_an_exception_has_its_traceback(forked, environment, tmp_path):
    (tmp_path / "bad.py").write_text("def fails():\n    return 1 / 0\nfails()\n")
    process = start(forked[0], tmp_path / "bad.py", environment)
    assert process.communicate()[1].endswith("ZeroDivisionError: division by zero\n")
    assert process.returncode == 1


WAIT = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("to_the_forked_one", [False, True])
def test_signals_reach_both(forked, environment, tmp_path, number, to_the_forked_one):
    (tmp_path / "wait.py").write_text(WAIT)
    process = start(forked[0], tmp_path / "wait.py", environment)
    child = int(process.stdout.readline())
    os.kill(child if to_the_forked_one else process.pid, number)
    _, err = process.communicate(timeout=60)
    # an interpreter that ends by KeyboardInterrupt kills itself by SIGINT; runpy does not
    assert process.returncode in ({-number, 1} if number == signal.SIGINT else {-number})
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    give_up = time.monotonic() + 60
    while psutil.pid_exists(child):
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_what_only_a_new_interpreter_can_do(forked, environment, tmp_path):
    interpreter, log = forked
    (tmp_path / "own.py").write_text("import os, sys; print(os.getppid(), 'torch' in sys.modules)")
    seen = log.read_text()
    for changed, options in (
        ({"OMP_NUM_THREADS": "3"}, []),
        ({"PYTHONPATH": "/other"}, []),
        ({}, ["-B"]),
    ):
        process = start(interpreter, tmp_path / "own.py", environment | changed, *options)
        assert process.communicate()[0] == f"{os.getpid()} False\n"
    assert log.read_text()[len(seen) :].splitlines() == [
        "fork_server: a new interpreter, because of other values of OMP_NUM_THREADS",
        "fork_server: a new interpreter, because of other values of PYTHONPATH",
        "fork_server: a new interpreter, because of the option -B",
    ]


@pytest.mark.parametrize("when", ["before", "while asked", "afterwards"])
def test_a_server_that_dies(environment, tmp_path, when):
    environment = environment | {MARK: f"test:{uuid.uuid4().hex}"}
    (tmp_path / "wait.py").write_text(WAIT.replace("600", "1"))
    with (
        (tmp_path / "log").open("ab") as log,
        fork_server(VERL, environment, log) as interpreter,
    ):
        if when == "before":
            end_run(environment[MARK])
        process = start(interpreter, tmp_path / "wait.py", environment | {MARK: ""})
        if when == "while asked":  # the server imports for seconds before it answers
            time.sleep(0.3)
            end_run(environment[MARK])
        child = int(process.stdout.readline())
        if when == "afterwards":
            os.kill(psutil.Process(child).ppid(), signal.SIGKILL)
        process.communicate()
    assert (child == process.pid, process.returncode) == (
        (False, 1) if when == "afterwards" else (True, 0)
    )


def test_a_server_with_threads_does_not_serve(tmp_path):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    )
    code = (
        "from verl_gdpo.cpu import fork_server as s; import socket, sys;"
        "s.MODULES = ['starts_a_thread']; a, b = socket.socketpair();"
        "sys.argv = ['', str(a.fileno())]; s.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "imports have started the threads" in done.stderr


def test_only_without_a_gpu(tmp_path):
    with (tmp_path / "log").open("ab") as log:
        for command, environment in (
            (VERL, {}),
            (VERL, {"VERL_PLATFORM": "cuda"}),
            ([sys.executable, "-c", ""], {"VERL_PLATFORM": "cpu"}),
        ):
            with fork_server(command, environment, log) as interpreter:
                assert interpreter == [sys.executable]
                assert workers_too(interpreter, command) == []


def test_the_workers_interpreter():
    interpreter = ["/my env/bin/python", "-I", "it's"]
    (override,) = workers_too(interpreter, VERL)
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(override)
    assert parsed.get_key_element() == f"++{WORKERS_INTERPRETER}"
    assert parsed.value() == "'/my env/bin/python' -I 'it'\"'\"'s'"
    mine = [*VERL, f"{WORKERS_INTERPRETER}=/my/python"]
    assert workers_too(interpreter, mine) == []


def test_modules_do_not_import_what_differs_between_processes():
    assert not {name.split(".")[0] for name in server.MODULES} & {"verl", "ray", "transfer_queue"}
