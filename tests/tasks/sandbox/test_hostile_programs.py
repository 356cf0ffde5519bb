"""Hostile programs of `hostile_programs.py` in every sandbox of this machine, and honest ones.

As root, another user runs them too. What is skipped in the place of a sandbox is a failure.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from unittest import mock

import pandas as pd
import psutil
import pytest
from hostile_programs import DRIVER, PROGRAMS
from of_machine import confinement_of
from repository import REPO

from verl_gdpo.tasks import sandbox
from verl_gdpo.tasks.coding import score as coding
from verl_gdpo.tasks.coding.problem import Problem
from verl_gdpo.tasks.sandbox import machine

NOBODY = 65534
OF_EVERYBODY = "/tmp"  # TMPDIR and this checkout may be where only root can read
CHUNK = 20  # programs that share a start of Python; each has a process and files of its own


WEAK = ["weak"] if machine.can_change_user() else []
WHERE = [(name, False) for name in ["bubblewrap", "landlock", *WEAK]]
if os.getuid() == 0:
    WHERE += [pytest.param("bubblewrap", True, marks=pytest.mark.slow), ("landlock", True)]
OLD_KERNELS = ("bubblewrap 0", "landlock 1", "landlock 3", "landlock 5")
WHERE += [pytest.param(name, False, marks=pytest.mark.slow) for name in OLD_KERNELS]


@contextlib.contextmanager
def targets(programs):
    """What each program may try to harm, of this user, and open to everybody."""
    base = Path(tempfile.mkdtemp(prefix="verl-gdpo-hostile-", dir=OF_EVERYBODY))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base)
        base.chmod(0o755)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in "ab")
        datagrams = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        unix.bind(str(base / "unix"))
        abstract.bind("\0" + base.name)
        datagrams.bind(str(base / "datagrams"))
        for listening in (unix, abstract):
            listening.listen()
        for name in ("unix", "datagrams"):
            (base / name).chmod(0o777)
        other = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(other.kill)
        shared = {"port": tcp.getsockname()[1], "unix": str(base / "unix"), "pid": other.pid}
        shared |= {"unix_datagrams": str(base / "datagrams"), "abstract": base.name}
        yield [
            shared | {"name": f"{base.name}-{number}"} | _files(base / str(number))
            for number in range(len(programs))
        ]


def _files(folder):
    paths = {n: str(folder / n) for n in ("secret", "private", "everybodys", "database", "link")}
    (folder / "empty").mkdir(parents=True)
    for name, mode in (("secret", 0o644), ("private", 0o600), ("everybodys", 0o666)):
        Path(paths[name]).write_text("x")
        Path(paths[name]).chmod(mode)
    with contextlib.suppress(OSError):  # not every file system has attributes
        os.setxattr(paths["everybodys"], "user.made", b"1")
    (folder / "hostile_module.py").write_text("")
    os.symlink("secret", paths["link"])
    with contextlib.closing(sqlite3.connect(paths["database"])) as database:
        database.execute("create table x (y)")
    for path in (folder, folder / "empty"):
        path.chmod(0o777)
    return {**paths, "folder": str(folder), "empty": str(folder / "empty")}


def run_all(kind, programs):
    """The outcome of each program."""
    outcomes = []
    with targets(programs) as harmless:
        tests = [
            {"input": json.dumps({"code": program.code, "targets": own})}
            for program, own in zip(programs, harmless, strict=True)
        ]
        with mock.patch.object(sandbox, "_confinement", lambda *_: kind):
            for start in range(0, len(tests), CHUNK):
                outcomes += sandbox.run(DRIVER, tests[start : start + CHUNK])
    return outcomes


@contextlib.contextmanager
def readable():
    """What nobody has to read of this checkout, and their folder for temporary files."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=OF_EVERYBODY))
        os.chown(folder, NOBODY, NOBODY)
        stack.enter_context(mock.patch.object(tempfile, "tempdir", folder))
        for module in (sandbox.lock, sandbox.inside):
            copy = Path(shutil.copy(module.__file__, folder))
            copy.chmod(0o644)
            stack.enter_context(mock.patch.object(module, "__file__", str(copy)))
        yield


@readable()
def as_nobody(function, *args):
    """What the function returns in a process of the user nobody."""
    receive, send = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.chdir("/")
            if not os.access(sys.base_prefix, os.R_OK | os.X_OK):  # a Python in root's home
                sys.executable, sys.base_prefix = "/usr/bin/python3", "/usr"
            machine._prefix.cache_clear()
            send.send(function(*args))
        except BaseException:
            send.send(traceback.format_exc())
        finally:
            os._exit(0)
    result = receive.recv()
    os.waitpid(child, 0)
    assert not isinstance(result, str), result
    return result


@pytest.mark.parametrize(("name", "is_nobody"), WHERE)
def test_each_program_does_what_its_table_says(name, is_nobody):
    def run():
        return run_all(confinement_of(name), PROGRAMS)

    outcomes = as_nobody(run) if is_nobody else run()
    wrong = {}
    for program, outcome in zip(PROGRAMS, outcomes, strict=True):
        said = [word for word in ("broken", "held") if word in outcome.output]
        expected = ["broken" if name.split()[0] in program.breaks else "held"]
        if not outcome.finished or said != expected:
            wrong[f"{program.what}: {program.name}"] = outcome
    assert not wrong


def unlocked():
    """The outcomes in Landlock's kind without its lock."""
    source = Path(sandbox.lock.__file__).read_text()
    open_lock = Path(tempfile.mkdtemp()) / "lock.py"
    open_lock.write_text(source + "\n\ndef lock(*_):\n    pass\n")
    with mock.patch.object(sandbox.lock, "__file__", str(open_lock)):
        outcomes = run_all(confinement_of("landlock"), PROGRAMS)
    shutil.rmtree(open_lock.parent)
    return dict(zip(PROGRAMS, outcomes, strict=True))


@pytest.mark.slow
def test_without_the_lock_they_do_harm():
    """To whom the programs run as; root's have one of their own, who may do less in /proc."""
    tried = [unlocked(), *([as_nobody(unlocked)] if os.getuid() == 0 else [])]
    held = {p for p in PROGRAMS if all("held" in outcomes[p].output for outcomes in tried)}
    assert {p.name for p in held if not p.needs_rights} == set()


# each would fill the kernel's memory, which the limits of bytes and of memory do not count
FILLERS = {
    "folders": "for i in itertools.count(): os.mkdir(f'/tmp/{i}')",
    "files": "for i in itertools.count(): open(f'/tmp/{i}', 'w').close()",
    "long names": "for i in itertools.count(): open(f'/tmp/{i:0240}', 'w').close()",
    "a chain of folders": "for i in itertools.count(): os.mkdir('d'), os.chdir('d')",
    "threads": """
numbers = itertools.count()
def fill():
    while True:
        os.mkdir(f'/tmp/{next(numbers)}')
for _ in range(50):
    threading.Thread(target=fill).start()
""",
}
PROMISED_FILES = 4096  # of docs/safety.md


# A program begins when the watch holds its folder.
WAIT_FOR_THE_WATCH = """
import itertools, os, threading, time
while os.stat("/tmp").st_mtime > 0:
    time.sleep(0.001)
"""


class FolderWatch(threading.Thread):
    """Opens the folder of the sandbox below this process, and lets its program begin.

    A file system in memory lives as long as somebody has a folder of it open. So its files can be
    counted after the program and the sandbox have ended.
    """

    def __init__(self):
        super().__init__()
        self.folder = None
        self.is_over = threading.Event()

    def run(self):
        ours = os.stat("/tmp").st_dev
        while self.folder is None and not self.is_over.wait(0.001):
            for process in psutil.Process().children(recursive=True):
                self.look_at(process.pid, ours)

    def look_at(self, pid, ours):
        name = f"/proc/{pid}/root/tmp"
        with contextlib.suppress(OSError):
            if self.folder is None and os.stat(name).st_dev != ours:
                self.folder = os.open(name, os.O_RDONLY)
                # Root may make no file in a folder of another user's sandbox.
                os.utime(self.folder, (0, 0))

    def count_files(self):
        status = os.fstatvfs(self.folder)
        return status.f_files - status.f_ffree

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.join()
        if self.folder is not None:
            os.close(self.folder)


@pytest.mark.parametrize("is_nobody", [False, True] if os.getuid() == 0 else [False])
@pytest.mark.parametrize("filler", FILLERS)
def test_a_program_that_fills_its_folder_with_files_is_ended(filler, is_nobody):
    def run():
        program = WAIT_FOR_THE_WATCH + FILLERS[filler]
        return sandbox.run(program, [{"input": ""}], confinement=confinement_of("bubblewrap"))

    with FolderWatch() as watch:
        (outcome,) = as_nobody(run) if is_nobody else run()
        files = watch.count_files()
    assert not outcome.finished
    # It did fill its folder, and it was ended long before the kernel's memory was full.
    assert 100 < files <= PROMISED_FILES


def test_a_program_may_have_a_thousand_files_and_make_more_one_after_the_other():
    program = (
        "import os\n"
        "for i in range(1000): open(f'/tmp/{i}', 'w').close()\n"
        "for i in range(5000):\n"
        "    os.mkdir('/tmp/again')\n"
        "    os.rmdir('/tmp/again')\n"
        "print(len(os.listdir('/tmp')))"
    )
    kind = confinement_of("bubblewrap")
    (outcome,) = sandbox.run(program, [{"input": ""}], confinement=kind)
    assert outcome == sandbox.TestResult(True, "1000\n")


# the line of the training's command that names its data, and the rest of a program's way to them
CHEAT = r"""
import glob, re
for name in glob.glob('/proc/[0-9]*/cmdline'):
    try: said = open(name).read()
    except OSError: continue
    if found := re.search(r'data.train_files=([^\0]+hostile.parquet)', said):
        print(re.search(rb'the answer \d+', open(found[1], 'rb').read())[0].decode())
"""


@pytest.mark.parametrize("name", ["bubblewrap", "landlock", "weak"])
def test_the_expected_results_in_the_training_data(name, tmp_path, monkeypatch):
    """A program of root's reads them from the file that the command line of a training names."""
    if name == "weak" and not machine.can_change_user():
        pytest.skip("only root has it")
    monkeypatch.setattr(sandbox, "_confinement", lambda *_: confinement_of(name))
    truth = Problem(None, ({"input": "", "output": "the answer 4711"},)).text()
    with targets([]) as _, tempfile.TemporaryDirectory(dir=OF_EVERYBODY) as folder:
        Path(folder).chmod(0o755)
        file = f"{folder}/hostile.parquet"
        pd.DataFrame({"truth": [truth]}).to_parquet(file, compression=None)
        command = [sys.executable, "-c", "input()", f"data.train_files={file}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE):
            rewards = coding.score(f"```python\n{CHEAT}\n```", truth)
    assert rewards["pass"] == (1.0 if name == "weak" else 0.0)


def test_the_table_of_what_holds():
    """recipes/README.md says of each kind what the programs of this file show."""
    text = (REPO / "recipes/README.md").read_text()
    for what in dict.fromkeys(program.what for program in PROGRAMS):
        broken = {name for p in PROGRAMS if p.what == what for name in p.breaks}
        cells = ["no" if name in broken else "yes" for name in ("bubblewrap", "landlock", "weak")]
        row = f"| {what} | {' | '.join(cells)} |"
        assert (row if broken else f"\n- {what}\n") in text


def test_bubblewrap_that_is_installed_and_fails(tmp_path, monkeypatch, caplog):
    """As in a container without rights: the next best is used, and nobody is told to install it."""
    fails = "#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n"
    (tmp_path / "bwrap").write_text(fails)
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sandbox._first_that_works.cache_clear()
    try:
        (said,) = sandbox.missing()
    finally:
        sandbox._first_that_works.cache_clear()
    assert "'landlock'" in said and "is installed" in said and "apt-get" not in said
    assert "Creating new namespace failed" in caplog.text
