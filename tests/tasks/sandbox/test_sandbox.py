"""What a program may and may not in a sandbox; in every kind that this machine should have.

`test_hostile_programs.py` has what it must not do to others.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import of_machine
import psutil
import pytest
from of_machine import confinement_of

from verl_gdpo.tasks import sandbox
from verl_gdpo.tasks.sandbox import NOT_FINISHED, ExecutionNotes, SandboxError, inside, machine, run
from verl_gdpo.tasks.sandbox.machine import FIRST_UID, Confinement, place


def printed(output):
    return sandbox.TestResult(True, output)


FAIL = (
    *("def f(:", "print(1 / 0)", "raise SystemExit(3)", "import os\nos._exit(1)"),
    *("import os\nos.kill(os.getpid(), 11)", "f = lambda: f()\nf()", "x" * 100_000),
    *("(" * 100_000, "\0", "\ud800", "import numpy"),  # the standard library alone
)
FORGED = '{"how": "finished", "output": "10"}\n'


@pytest.fixture(params=("bubblewrap", "landlock"))
def kind(request, monkeypatch):
    found = confinement_of(request.param)
    monkeypatch.setattr(sandbox, "_confinement", lambda *_: found)
    return found


def only(program, given="", **limits):
    (outcome,) = run(program, [{"input": given}], **limits)
    return outcome


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
        *((program, "", None) for program in FAIL),
    ],
)  # fmt: skip
def test_a_program(kind, program, given, output):
    assert only(program, given) == (NOT_FINISHED if output is None else printed(output))


def test_a_large_input_is_whole(kind):
    """It is larger than all that the program may print."""
    size = 14 * sandbox.OUTPUT_BYTES
    assert only("import sys\nprint(len(sys.stdin.buffer.read()))", "x" * size).output == f"{size}\n"


def test_each_test_is_a_program_of_its_own(kind):
    program = "seen = globals().setdefault('seen', [])\nseen.append(input())\nprint(seen)"
    tests = [{"input": "a"}, {"input": ""}, {"input": "b"}]
    assert run(program, tests) == [printed("['a']\n"), NOT_FINISHED, printed("['b']\n")]


@pytest.mark.parametrize(
    "program",
    [
        "def f(a, b=0): print('noise'); return [a, b]",
        "class Solution:\n    def f(self, a: List[int], b=0): return a, b",
        # the prelude has a function of this name
        "class Solution:\n    def merge(self, a, b=0): return a, b",
        "def merge(a, b=0): return a, b",
        # a class is looked up by the name of its module
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Pair:\n    a: Any\n    b: int = 0\n"
        "def f(a, b=0):\n    pair = Pair(a, b)\n    return pair.a, pair.b",
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
        ("class Any:\n    __eq__ = bool\ndef f(): return Any()", printed("?")),
        ("class Any(int):\n    __eq__ = bool\ndef f(): return Any(3)", printed("3")),
        ("def f():\n    x = []\n    x.append(x)\n    return x", printed("?")),
        (f"def f(): print({FORGED!r}); return 2", printed("2")),
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


def test_threads_are_bounded(kind):
    """The user's other processes may end meanwhile, which leaves room for more."""
    program = (
        "import threading\n"
        "threading.stack_size(1 << 15)\n"
        "stop, count = threading.Event(), 0\n"
        "try:\n"
        "    while True: threading.Thread(target=stop.wait).start(); count += 1\n"
        "except RuntimeError: print(count); stop.set()"
    )
    assert 32 < int(only(program, memory_mb=2048).output) < 2 * inside.THREADS


def test_threads_start_where_the_usual_stack_is_larger_than_the_memory(kind):
    """As after `ulimit -s 2000000`; and they are bounded there."""
    limits = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (2_000_000 << 10, limits[1]))
    try:
        assert only("import threading\nthreading.Thread(target=print).start()").output == "\n"
        test_threads_are_bounded(kind)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, limits)


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


def test_the_folder_of_a_program_is_small_and_gone_afterwards(kind):
    program = (
        "import os, tempfile\n"
        "here = os.listdir('.') if input() else []\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    os.rename(__import__('shutil').move(tempfile.mkstemp()[1], folder), 'file')\n"
        "    print(here, open('file', 'w').write('x'), sorted(os.listdir('.'))[0])"
    )
    large = "with open('big', 'wb') as file:\n    for _ in range(100): file.write(bytes(1 << 20))"
    many = "for n in range(100):\n    with open(str(n), 'wb') as file: file.write(bytes(1 << 20))"
    for _ in range(2):
        outcome = only(program, "x" if kind.folder else "")
        assert outcome == (printed("[] 1 file\n") if kind.folder else NOT_FINISHED)
    assert only(large.replace("range(100)", "range(1)")).finished == bool(kind.folder)
    assert only(large) == only(many) == NOT_FINISHED


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
    ended = printed("end\n")
    assert run(program, tests, seconds=1, wall_seconds=60) == [ended, NOT_FINISHED, NOT_FINISHED]
    assert only(program, "sleep", wall_seconds=0.5) == NOT_FINISHED


def test_the_first_test_that_a_signal_ends_is_the_last(kind):
    program = "import os\nif input(): os.kill(os.getpid(), 9)\nprint('end')"
    notes, ended = ExecutionNotes(), printed("end\n")
    tests = [{"input": what} for what in ("\n", "x", "\n")]
    assert run(program, tests, notes=notes) == [ended, NOT_FINISHED, NOT_FINISHED]
    assert notes.stopped
    # an exception ends its own test alone
    notes = ExecutionNotes()
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
    monkeypatch.setattr(inside, "STARTUP_SECONDS", 3600)
    program = (
        "import os, time\n"
        "print(number := input())\n"
        "if number == '2': os.kill(os.getppid(), 19); time.sleep(3600)"
    )
    tests, results = [{"input": "1"}, {"input": "2"}], []
    ends = threading.Thread(target=lambda: results.extend(run(program, tests, wall_seconds=1)))
    ends.daemon = True
    ends.start()
    ends.join(60)
    assert results == [printed("1\n"), NOT_FINISHED]


def test_a_program_does_not_outlive_what_started_it(monkeypatch):
    """Which its alarm ends, where the training was killed and nobody ends the group."""
    monkeypatch.setattr(sandbox, "_confinement", lambda *_: confinement_of("landlock"))
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    programs = []

    def end_it(pid, *_):
        end = time.monotonic() + 60
        while not programs and time.monotonic() < end:
            programs.extend(locked_children(pid))
        os.kill(pid, signal.SIGALRM)

    monkeypatch.setattr(sandbox, "_wait", end_it)
    assert only("import time\ntime.sleep(3600)") == NOT_FINISHED
    (program,) = programs
    with open(os.pidfd_open(program)) as handle:
        try:
            assert select.select([handle], [], [], 30)[0], "it still runs"
        finally:
            signal.pidfd_send_signal(handle.fileno(), signal.SIGKILL)


CALLER = """
import sys, threading
from verl_gdpo.tasks import sandbox
sys.path.insert(0, {helpers!r})
from of_machine import confinement_of
print(sandbox.run("print(1)", [{{"input": ""}}], confinement=confinement_of({kind!r})), flush=True)
program = "import time\\ntime.sleep(3600)"
thread = threading.Thread(target=lambda: sandbox.run(
    program, [{{"input": ""}}], wall_seconds=3600, confinement=confinement_of({kind!r})))
thread.start()
"""


def test_a_program_ends_when_its_caller_is_killed(kind):
    """Its alarm is an hour away. The caller's thread is a worker's, as in a training."""
    helpers = str(Path(of_machine.__file__).parent)
    code = CALLER.format(helpers=helpers, kind=kind.name)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as caller:
        assert b"finished=True" in caller.stdout.readline()
        programs = []
        end = time.monotonic() + 60
        while not programs and time.monotonic() < end:
            below = psutil.Process(caller.pid).children(recursive=True)
            programs = [process for process in below if locks(process.pid) > locks(os.getpid())]
        caller.kill()
    assert len(programs) == 1
    _, alive = psutil.wait_procs(programs, timeout=30)
    for process in alive:
        process.kill()
    assert not alive, "it still runs"


def test_a_program_gets_no_handle_of_its_caller(kind):
    """Also where the caller has so many files open that its number is high."""
    program = (
        "import os\n"
        "for n in range(3, 1000):\n"
        "    try: os.fstat(n)\n"
        "    except OSError: continue\n"
        "    print(n)"
    )
    before = only(program).output
    with contextlib.ExitStack() as files:
        for _ in range(200):
            files.enter_context(open(os.devnull))
        assert only(program).output == before
    assert len(before.split()) <= len(kind.files)


def locks(pid):
    """How many filters of seccomp a process has: all have one in some containers."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"\nSeccomp_filters:\t(\d+)", status)[1])
    return 0


def locked_children(pid):
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text()
            if f"\nPPid:\t{pid}\n" in text and "\nSeccomp:\t2\n" in text:
                yield int(status.parent.name)


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


def test_root_runs_each_program_as_another_user(kind):
    if machine.can_change_user():
        program = "import os\nprint(os.getuid(), os.getgid(), os.getgroups())"
        first, second = (only(program).output.split() for _ in range(2))
        assert int(first[0]) == int(first[1]) >= FIRST_UID and first[2:] == ["[]"]
        assert first[0] != second[0]


def test_the_same_program_gives_the_same_output(kind):
    program = "import random\nprint({'a', 'b', 'c', 'd'}, random.random(), hash('x'))"
    assert only(program) == only(program)


def test_lines_that_the_inside_cannot_have_written():
    for line in (b"", b"{", b"[]", b'{"how": "finished"}', b"1", b"[" * 100_000, b"\xff"):
        assert sandbox._result(line) == NOT_FINISHED
    assert sandbox._result(b'{"how": "finished", "output": "x"}') == printed("x")


def test_so_many_at_once_as_there_are_cores(monkeypatch, tmp_path):
    """Six threads, two cores: never more than two run, and at some time two do."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # no other process takes these places
    two, now, most = threading.Event(), [], []

    def hold(number):
        with place():
            now.append(number)
            most.append(len(now))
            if len(now) == 2:
                two.set()
            two.wait(30)  # the first one waits for a second one
            time.sleep(0.1)  # and a third one would come
            now.remove(number)

    with ThreadPoolExecutor(6) as threads:
        [*threads.map(hold, range(6))]
    assert max(most) == 2


def test_whoever_waits_gets_the_place_that_is_free_first(monkeypatch, tmp_path):
    """Of two places, each is the one that is left once; who waits opens no file meanwhile."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for first in (0, 1):
        held = [place(), place()]
        for each in held:
            each.__enter__()
        notes, begun = ExecutionNotes(), threading.Event()

        def wait(notes=notes, begun=begun):
            with place():
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
    with place():  # makes the folder
        pass
    before = len(os.listdir("/proc/self/fd"))
    with place(), place():
        assert len(os.listdir("/proc/self/fd")) == before + 2


@pytest.mark.parametrize(
    ("share", "cores"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("", 8)],
)
def test_a_container_has_the_cores_of_its_share(monkeypatch, tmp_path, share, cores):
    """Else a container with 2 of 8 cores would run eight programs, in four times the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "CPU_MAX", tmp_path / "cpu.max")
    if share:
        (tmp_path / "cpu.max").write_text(f"{share}\n")
    assert machine.cores() == cores


def test_a_process_that_is_forked_meanwhile_keeps_no_place(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with place():
        child = os.fork()
        if child == 0:
            signal.pause()
    with contextlib.ExitStack() as stack:
        stack.callback(os.waitpid, child, 0)
        stack.callback(os.kill, child, signal.SIGKILL)
        (file,) = tmp_path.glob("*/0")
        with file.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def untried(monkeypatch):
    """As in a new process."""
    sandbox._first_that_works.cache_clear()
    yield monkeypatch
    sandbox._first_that_works.cache_clear()


def test_a_machine_without_a_sandbox_is_no_bad_program(untried):
    """No programs run, and it is said what is wrong and what helps."""
    broken = Confinement("landlock", ("/bin/sh", "-c", "echo no Python here >&2"))
    kinds = [broken, replace(broken, command=("/no/x",))]
    untried.setattr(machine, "confinements", lambda _: iter(kinds))
    with pytest.raises(SandboxError, match=r"landlock: no Python here; .*weak_sandbox=True"):
        run("print(1)", [{"input": ""}])


def test_a_sandbox_that_runs_programs_wrongly_is_not_used(untried):
    untried.setattr(sandbox, "PROBE", "print('something else')")
    with pytest.raises(SandboxError, match="of a program that prints"):
        sandbox.missing()


def test_what_is_missing_is_said_once(untried, caplog):
    lacking = replace(confinement_of("landlock"), lacks="a program can reach the moon")
    bad = Confinement("bubblewrap", ("/no/bwrap",))
    untried.setattr(machine, "confinements", lambda _: iter([bad, lacking]))
    with caplog.at_level(logging.WARNING):
        assert only("print(1)").finished and only("print(2)").finished
        assert "can reach the moon" in sandbox.missing()[0]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "/no/bwrap" in said[0] and "reach the moon" in said[1]


def test_the_best_kind_lacks_nothing(untried):
    confinement_of("bubblewrap")
    assert sandbox._confinement().name == "bubblewrap" and sandbox.missing() == []


def test_the_weak_kind_has_to_be_allowed(untried):
    """And it is root's alone: it keeps a program from other users, not from the training's own."""
    untried.setattr(machine.shutil, "which", lambda _: "/no/bwrap")
    untried.setattr(machine, "landlock_version", lambda: 5)
    for is_root, allowed, more in ((1, 0, []), (1, 1, ["weak"]), (0, 1, [])):
        untried.setattr(machine, "can_change_user", lambda is_root=is_root: bool(is_root))
        names = [kind.name for kind in machine.confinements(allow_weak=bool(allowed))]
        assert names == ["bubblewrap", "landlock", *more]


@pytest.mark.parametrize(
    ("bwrap", "landlock", "said", "not_said"),
    [
        ("", 5, ["apt-get install bubblewrap"], "Linux 5.13"),
        ("/no/bwrap", 0, ["is installed", "--cap-add SYS_ADMIN", "Slurm", "Linux 5.13"], "apt-get"),
    ],
)
def test_the_advice_is_for_this_machine(untried, bwrap, landlock, said, not_said):
    untried.setattr(machine.shutil, "which", lambda _: bwrap)
    untried.setattr(machine, "landlock_version", lambda: landlock)
    advice = machine.advice()
    assert all(text in advice for text in said) and not_said not in advice


@pytest.mark.parametrize("damage", ["a link", "open to others", "a file", "another user's"])
def test_the_folder_of_the_places_has_to_be_ours(monkeypatch, tmp_path, damage):
    """Else another user's links would have files of ours emptied."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if damage == "another user's":
        somebody = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: somebody)
    folder, other = tmp_path / f"verl-gdpo-sandboxes-{os.getuid()}", tmp_path / "other"
    other.mkdir(mode=0o700)
    if damage == "a link":
        folder.symlink_to(other)
    elif damage == "a file":
        folder.touch(mode=0o700)
    elif damage == "another user's":
        folder.mkdir(mode=0o700)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(SandboxError, match=r"expected drwx------ of user"), place():
        pass
    assert not [*other.iterdir()]


def test_the_places_are_no_links(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    folder, full = tmp_path / f"verl-gdpo-sandboxes-{os.getuid()}", tmp_path / "full"
    folder.mkdir(mode=0o700)
    full.write_text("x")
    (folder / "0").symlink_to(full)
    with pytest.raises(OSError, match="symbolic links"), place():
        pass
    assert full.read_text() == "x"
