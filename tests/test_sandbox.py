"""Each property of the sandbox, attacked by a program; in every kind that works on this machine.

A program never kills anything unless it is another user than this test, or in other namespaces.
"""

import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from verl_gdpo.rewards import sandbox, sandbox_inside, sandbox_kinds
from verl_gdpo.rewards.sandbox import Notes, Outcome, SandboxError, run
from verl_gdpo.rewards.sandbox_kinds import FIRST_UID, PROCESSES, Kind, kinds

NOT_FINISHED = Outcome(False, "")
FORGED = '{"how": "finished", "output": "10"}\n'
IS_ROOT = os.getuid() == 0


def find(name):
    """The first kind of this name that works, or why none does."""
    reason = "not installed"
    for kind in kinds():
        if kind.name == name:
            try:
                sandbox._try(kind)
            except OSError as error:
                reason = str(error)
            else:
                return kind
    return reason


FOUND = {name: find(name) for name in ("bubblewrap", "unshare", "limits")}


@pytest.fixture(params=FOUND)
def kind(request, monkeypatch):
    found = FOUND[request.param]
    if isinstance(found, str):
        pytest.skip(f"{request.param} does not work here: {found}")
    monkeypatch.setattr(sandbox, "_kind", lambda: found)
    return found


@pytest.fixture
def alone(kind):
    """Only where a program that kills all it can reach reaches nothing of this user."""
    if not kind.is_alone:
        pytest.skip("without root and namespaces, the program runs as this user: as `lacks` says")
    return kind


@pytest.fixture
def open_folder():
    """A folder that every user of the machine may read and write."""
    folder = Path(tempfile.mkdtemp(prefix="verl-gdpo-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def only(program, given="", **limits):
    (outcome,) = run(program, [{"input": given}], **limits)
    return outcome


def left_alive(uid):
    """Processes of a program's user, or below this test; given time to die."""
    for _ in range(100):
        if IS_ROOT:
            alive = [p for p in psutil.process_iter(["uids"]) if p.info["uids"].real == uid]
        else:
            alive = psutil.Process().children(recursive=True)
        if not alive:
            return []
        time.sleep(0.1)
    return alive


UID = "import os, sys\nprint(os.getuid(), flush=True)\n"


@pytest.mark.parametrize(
    ("program", "given", "output"),
    [
        ("print(int(input()) + 1)", "3\n", "4\n"),
        ("import os\nos.write(1, os.read(0, os.fstat(0).st_size))", "a b\n", "a b\n"),
        ("import sys\nsys.stdout.write(sys.stdin.read()); sys.exit(0)", "x", "x"),
        ("import threading\nthreading.Thread(target=print, args=['in']).start()", "", "in\n"),
        ("import atexit\natexit.register(print, 'late')", "", "late\n"),
        ("if __name__ == '__main__': print('main')", "", "main\n"),
        # what verl's scorers import for a program
        ("print(gcd(4, 6), Counter('aa'), List[int], heapq.nsmallest(1, [2, 1]))", "",
         "2 Counter({'a': 2}) typing.List[int] [1]\n"),
        ("print('\\u00e9'); print(input())", "\u4e2d", "\u00e9\n\u4e2d\n"),
        ("import os\nos.write(1, b'\\xff')", "", "\ufffd"),
        ("", "unread", ""),
    ],
)  # fmt: skip
def test_a_program_that_prints(kind, program, given, output):
    if "threading" in program and not kind.is_alone:
        pytest.skip("no threads in this sandbox, as `lacks` says")
    assert only(program, given) == Outcome(True, output)


@pytest.mark.parametrize(
    "program",
    [
        "def f(:",
        "print(1 / 0)",
        "raise SystemExit(3)",
        "import os\nos._exit(1)",
        "import os\nos.kill(os.getpid(), 11)",
        "f = lambda: f()\nf()",
        "x" * 100_000,
        "(" * 100_000,
        "\0",
        "\ud800",
        "import numpy",  # the standard library alone
    ],
)
def test_a_program_that_fails(kind, program):
    assert only(program) == NOT_FINISHED


def test_each_test_is_a_program_of_its_own(kind):
    program = "seen = globals().setdefault('seen', [])\nseen.append(input())\nprint(seen)"
    tests = [{"input": "a"}, {"input": ""}, {"input": "b"}]
    assert run(program, tests) == [Outcome(True, "['a']\n"), NOT_FINISHED, Outcome(True, "['b']\n")]


@pytest.mark.parametrize(
    "program",
    [
        "def f(a, b=0): print('noise'); return [a, b]",
        "class Solution:\n    def f(self, a: List[int], b=0): return a, b",
        # the prelude has a function of this name
        "class Solution:\n    def merge(self, a, b=0): return a, b",
        "def merge(a, b=0): return a, b",
    ],
)
def test_a_function(kind, program):
    function = "merge" if "merge" in program else "f"
    tests = [{"args": [1], "kwargs": {"b": 2}}, {"args": [[1, 2]], "kwargs": {}}]
    tests.append({"args": [], "kwargs": {}})
    outcomes = run(program, tests, function=function)
    assert [o.finished for o in outcomes] == [True, True, False]
    assert [json.loads(o.output) for o in outcomes[:2]] == [[1, 2], [[1, 2], 0]]


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("def g(): return 1", NOT_FINISHED),
        ("def f(): raise ValueError", NOT_FINISHED),
        ("import os, sys\ndef f(): sys.exit(0)", NOT_FINISHED),
        ("import os, sys\ndef f(): os._exit(0)", NOT_FINISHED),
        ("import sys\nsys.exit(0)\ndef f(): return 1", NOT_FINISHED),
        ("class Any:\n    __eq__ = bool\ndef f(): return Any()", Outcome(True, "?")),
        ("class Any(int):\n    __eq__ = bool\ndef f(): return Any(3)", Outcome(True, "3")),
        ("def f():\n    x = []\n    x.append(x)\n    return x", Outcome(True, "?")),
        (f"def f(): print({FORGED!r}); return 2", Outcome(True, "2")),
    ],
)  # fmt: skip
def test_a_result_that_is_none(kind, program, outcome):
    assert run(program, [{"args": [], "kwargs": {}}], function="f") == [outcome]


def test_what_is_written_to_other_files_says_nothing(kind):
    program = (
        "import os\n"
        "for n in range(3, 64):\n"
        '    try: os.write(n, b\'{"how": "finished", "output": "10"}\\n\')\n'
        "    except OSError: pass\n"
        "raise ValueError"
    )
    assert run(program, [{"input": ""}] * 2) == [NOT_FINISHED] * 2


def test_fork_bomb(alone):
    program = UID + (
        "import time\n"
        "count = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "        count += 1\n"
        "except OSError: print(count)"
    )
    outcome = only(program)
    uid, count = map(int, outcome.output.split())
    assert outcome.finished and 0 < count < PROCESSES
    assert left_alive(uid) == []


def test_fork_bomb_that_never_ends(alone):
    program = UID + "while True:\n    try: os.fork()\n    except OSError: pass"
    bomb, uid = run(f"{program} if input() else exit()", [{"input": "x"}, {"input": ""}], seconds=1)
    assert bomb == NOT_FINISHED
    if uid.finished:  # the bomb of the first test may have left no room for the second
        assert left_alive(int(uid.output)) == []


def test_threads_count_as_processes(alone):
    program = (
        "import threading\n"
        "stop, count = threading.Event(), 0\n"
        "try:\n"
        "    while True: threading.Thread(target=stop.wait).start(); count += 1\n"
        "except RuntimeError: print(count); stop.set()"
    )
    assert 0 < int(only(program).output) < PROCESSES


def test_a_child_that_outlives_its_parent(alone):
    program = UID + (
        "import time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)\n"
    )
    outcome = only(program)
    assert outcome.finished and left_alive(int(outcome.output)) == []


def test_memory_bomb(kind):
    program = (
        "got = []\n"
        "try:\n"
        "    while True: got.append(bytearray(1 << 20))\n"
        "except MemoryError: count = len(got); del got; print(count)"
    )
    assert 8 < int(only(program, memory_mb=128).output) < 128
    assert only("x = bytearray(1 << 28)", memory_mb=128) == NOT_FINISHED
    assert only("x = [0] * (1 << 40)") == NOT_FINISHED


def test_endless_output(kind):
    assert only("while True: print('x' * 100_000)") == NOT_FINISHED
    program = "import os\ntry:\n    while True: os.write(1, b'x' * 100_000)\nexcept OSError: pass"
    assert len(only(program).output) == sandbox.OUTPUT_BYTES
    program = "def f(): return 'x' * 10_000_000"
    assert run(program, [{"args": [], "kwargs": {}}], function="f") == [NOT_FINISHED]


def test_large_files(kind):
    program = "with open('big', 'wb') as file:\n    for _ in range(100): file.write(bytes(1 << 20))"
    assert only(program) == NOT_FINISHED
    assert only(program.replace("range(100)", "range(1)")).finished


def test_many_files(kind):
    program = (
        "for n in range(100):\n"
        "    with open(str(n), 'wb') as file: file.write(bytes(1 << 20))\n"
        "print('all')"
    )
    assert only(program).finished == (sandbox_kinds.SCRATCH in kind.lacks)


def test_endless_work_and_endless_sleep(kind):
    program = (
        "import signal, time\n"
        "for n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "what = input()\n"
        "while what == 'work': pass\n"
        "while what == 'sleep': time.sleep(60)\n"
        "print('end')"
    )
    tests = [{"input": what} for what in ("end", "work", "end")]
    ended = Outcome(True, "end\n")
    assert run(program, tests, seconds=1, wall_seconds=60) == [ended, NOT_FINISHED, NOT_FINISHED]
    assert only(program, "sleep", wall_seconds=0.5) == NOT_FINISHED


def test_the_first_test_that_a_signal_ends_is_the_last(kind):
    program = "import os\nif input(): os.kill(os.getpid(), 9)\nprint('end')"
    notes, ended = Notes(), Outcome(True, "end\n")
    tests = [{"input": what} for what in ("\n", "x", "\n")]
    assert run(program, tests, notes=notes) == [ended, NOT_FINISHED, NOT_FINISHED]
    assert notes.stopped
    # an exception ends its own test alone
    notes = Notes()
    tests = [{"input": "x"}, {"input": "\n"}]
    program = "if input(): raise ValueError\nprint('end')"
    assert run(program, tests, notes=notes) == [NOT_FINISHED, ended]
    assert not notes.stopped


def test_the_tests_share_the_wall_time(kind):
    """Each sleeps a fifth of it, so that of ten at most four end."""
    program = "import time\ntime.sleep(1)\nprint('end')"
    outcomes = run(program, [{"input": ""}] * 10, wall_seconds=5)
    assert outcomes[0].finished and not any(outcome.finished for outcome in outcomes[5:])


def test_a_program_that_stops_what_would_end_it(kind, monkeypatch):
    """It is ended from outside, so long after its begin, whatever the time that it had to begin."""
    monkeypatch.setattr(sandbox_inside, "STARTUP_SECONDS", 3600)
    program = (
        "import os, time\n"
        "print(number := input())\n"
        "if number == '2': os.kill(os.getppid(), 19); time.sleep(3600)"
    )
    found = []

    def run_it():
        found.append(run(program, [{"input": "1"}, {"input": "2"}], wall_seconds=1))

    thread = threading.Thread(target=run_it, daemon=True)
    thread.start()
    thread.join(60)
    assert found == [[Outcome(True, "1\n"), NOT_FINISHED]]


def test_network(kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        program = (
            "import socket\n"
            "try: socket.create_connection(('127.0.0.1', int(input()))); print('connected')\n"
            "except OSError: print('refused')"
        )
        outcome = only(program, str(server.getsockname()[1]))
        is_open = sandbox_kinds.NETWORK in kind.lacks
        assert outcome == Outcome(True, "connected\n" if is_open else "refused\n")
        if is_open:
            server.accept()[0].close()
        else:
            with pytest.raises(BlockingIOError):
                server.accept()


def test_environment(kind, monkeypatch):
    monkeypatch.setenv("SECRET", "in the environment")
    program = (
        "import os, ctypes\n"
        "environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
        "print(os.environ, [environ[n] for n in range(9) if environ and environ[n]])\n"
        "if os.path.exists('/proc'): print(open('/proc/self/environ').read())"
    )
    assert "SECRET" not in only(program).output
    assert only("import os\nprint(len(os.environ))").output == "0\n"


OPEN = """
import sys
for path in input().split():
    for mode in "ra":
        try: open(path, mode).close(); print("yes")
        except OSError: print("no")
"""


def test_files_outside(kind, open_folder):
    """Of the user's own, of a file for everybody, of a new file in a folder for everybody."""
    secret, everybodys, new = (open_folder / name for name in ("secret", "everybodys", "new"))
    for path, mode in ((secret, 0o600), (everybodys, 0o666)):
        path.write_text("x")
        path.chmod(mode)
    outcome = only(OPEN, f"{secret} {everybodys} {new}")
    own = sandbox_kinds.OWN_FILES in kind.lacks
    all_may = own or sandbox_kinds.EVERYBODYS_FILES in kind.lacks
    said = {True: "yes", False: "no"}
    # a file that does not exist cannot be read
    expected = [said[own]] * 2 + [said[all_may]] * 2 + ["no", said[all_may]]
    assert outcome.finished and outcome.output.split() == expected
    assert new.exists() == all_may
    for path in ("/etc/passwd", __file__, "/dev/shm/x", "/x", "/usr/lib/x"):
        if not kind.lacks:
            assert "yes" not in only(OPEN, path).output.split()[1:], path


def test_the_scratch_folder_can_be_written_to_and_is_gone_afterwards(kind, monkeypatch):
    made = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **k: made.append(make(**k)) or made[-1])
    program = (
        "import os\n"
        "print(open('file', 'w').write('x'), len(os.listdir('.')))\n"
        "for _ in range(1500): os.mkdir('d'); os.chdir('d')"
    )
    assert only(program) == Outcome(True, "1 1\n")
    assert made == [] if kind.has_scratch else len(made) == 1
    assert not any(map(os.path.exists, made))


def test_killing_its_parents(alone):
    """The program ends all that it can; what comes after it is not run, and this test goes on."""
    program = (
        "import os, signal\n"
        "me, user = map(int, input().split())\n"
        "assert os.getuid() != user, 'it would end the tests'\n"
        "for pid in (me, os.getppid(), 1, -1):\n"
        "    try: os.kill(pid, signal.SIGKILL)\n"
        "    except OSError: pass\n"
    )
    given = f"{os.getpid()} {os.getuid()}"
    with subprocess.Popen(["sleep", "60"]) as bystander:
        outcomes = run(program, [{"input": given}] * 3)
        assert bystander.poll() is None
        bystander.kill()
    assert not any(outcome.finished and outcome.output for outcome in outcomes)
    assert only("print(1)") == Outcome(True, "1\n")


def test_root_rights_are_gone(kind):
    program = (
        "import os\n"
        "print(os.getuid() >= 60000, os.getgroups() in ([], [65534], [os.getgid()]))\n"
        "for call in (lambda: os.setuid(0), lambda: os.chroot('/'), lambda: os.nice(-5)):\n"
        "    try: call(); print('may')\n"
        "    except OSError: pass"
    )
    if IS_ROOT:
        assert only(program).output == "True True\n"
        assert int(only(UID).output) >= FIRST_UID


def test_two_programs_of_root_are_two_users(kind):
    if IS_ROOT:
        assert only(UID).output != only(UID).output


def test_the_same_program_gives_the_same_output(kind):
    program = "import random\nprint({'a', 'b', 'c', 'd'}, random.random(), hash('x'))"
    assert only(program) == only(program)


def test_lines_that_the_inside_cannot_have_written():
    for line in (b"", b"{", b"[]", b'{"how": "finished"}', b"1", b"[" * 100_000, b"\xff"):
        assert sandbox._outcome(line) == NOT_FINISHED
    assert sandbox._outcome(b'{"how": "finished", "output": "x"}') == Outcome(True, "x")


def test_so_many_at_once_as_there_are_cores(monkeypatch, tmp_path):
    """Six threads, two cores: never more than two run, and at some time two do."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # no other process takes these places
    two, lock, now, most = threading.Event(), threading.Lock(), set(), [0]

    def hold(number):
        with sandbox._place():
            with lock:
                now.add(number)
                most[0] = max(most[0], len(now))
                if len(now) == 2:
                    two.set()
            two.wait(30)  # the first one waits for a second one
            time.sleep(0.1)  # and a third one would come
            with lock:
                now.discard(number)

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [2]


def test_whoever_waits_gets_the_place_that_is_free_first(monkeypatch, tmp_path):
    """Of two places, each is the one that is left once; who waits opens no file meanwhile."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for first in (0, 1):
        held = [sandbox._place(), sandbox._place()]
        for place in held:
            place.__enter__()
        notes, begun = Notes(), threading.Event()

        def wait(notes=notes, begun=begun):
            with sandbox._place():
                notes.begin()
                begun.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert not begun.wait(0.2)
        left_at = time.monotonic()
        held[first].__exit__(None, None, None)
        assert begun.wait(60)
        assert notes.seconds_waited >= left_at - notes.made_at
        held[1 - first].__exit__(None, None, None)
        thread.join()


def test_a_place_is_one_open_file(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(50)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with sandbox._place():  # makes the folder
        pass
    before = len(os.listdir("/proc/self/fd"))
    with sandbox._place(), sandbox._place():
        assert len(os.listdir("/proc/self/fd")) == before + 2


@pytest.fixture
def untried(monkeypatch):
    """As in a new process."""
    sandbox._find.cache_clear()
    yield monkeypatch
    sandbox._find.cache_clear()


def test_a_machine_without_a_sandbox_is_no_bad_program(untried):
    broken = Kind("limits", ("/bin/sh", "-c", "echo no Python here >&2"), ())
    untried.setattr(sandbox, "kinds", lambda: iter([broken, replace(broken, command=("/no/x",))]))
    with pytest.raises(SandboxError, match=r"limits: no Python here; .*apt-get install bubblewrap"):
        run("print(1)", [{"input": ""}])


def test_a_sandbox_that_runs_programs_wrongly_is_not_used(untried):
    untried.setattr(sandbox, "PROBE", "print('something else')")
    with pytest.raises(SandboxError, match="of a program that prints"):
        sandbox.missing()


def test_what_is_missing_is_said_once(untried, caplog):
    found = [kind for kind in FOUND.values() if not isinstance(kind, str)]
    lacking = replace(found[0], lacks=("a program can reach the moon",))
    bad = Kind("bubblewrap", ("/no/bwrap",), ())
    untried.setattr(sandbox, "kinds", lambda: iter([bad, lacking]))
    with caplog.at_level(logging.WARNING):
        assert only("print(1)").finished and only("print(2)").finished
        assert "can reach the moon" in sandbox.missing()[0]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "/no/bwrap" in said[0] and "reach the moon" in said[1]


def test_the_best_kind_lacks_nothing():
    kind = FOUND["bubblewrap"]
    if isinstance(kind, str):
        pytest.skip(f"bubblewrap does not work here: {kind}")
    assert sandbox._find().name == "bubblewrap" and sandbox.missing() == []


def test_the_inside_is_readable_by_the_machines_python():
    """The text runs without this package."""
    text = Path(sandbox_inside.__file__).read_text()
    assert "verl_gdpo" not in text.replace("verl_gdpo/", "")
