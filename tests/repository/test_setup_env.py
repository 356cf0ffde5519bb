"""The environments that `setup_env.sh` makes and switches, with a Python that installs nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from executable import program
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import marked, wait_for
from repository import REPO

# notes each call with what .venv is meanwhile; `pip install` waits while ./wait is there, and that
# which fetches torch beside the others while ./wait-torch is
PYTHON = f"""#!/bin/bash
case "$1 $2" in
  "-m venv" | "-m pip" | "-m compileall") ;;
  *) [[ $0 != */.venv-* ]] || exit 1; exec {sys.executable} "$@" ;;
esac
echo "begin $2 $(readlink .venv) $*" >>calls
[[ "$*" != *"--no-deps torch"* ]] || of=-torch
case $2 in
  venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  pip) while [ -e wait$of ]; do sleep .05; done; [ ! -e fail$of ] || {{ cat fail$of; exit 7; }}
    # the compiling beside this one begins before it ends
    [[ "$*" != *"--no-compile torch"* ]] ||
      for _ in {{1..100}}; do ! grep -q compileall calls || break; sleep .1; done ;;
esac
echo "end $2 $(readlink .venv)" >>calls
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    made = tmp_path / "checkout"
    made.mkdir()
    for name in ("setup_env.sh", "pyproject.toml"):
        shutil.copy(REPO / name, made)
    shutil.copytree(REPO / "requirements", made / "requirements")
    for name in ("python3", "python3.12"):
        program(tmp_path / "bin" / name, PYTHON)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return made


def start(checkout, *extras):
    command = [checkout / "setup_env.sh", *extras]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


def setup(checkout, *extras):
    """(exit code, the folder that it prints, messages)"""
    process = start(checkout, *extras)
    output, errors = process.communicate(timeout=60)
    return process.returncode, Path(output.rstrip("\n")), errors


def calls(checkout):
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_every_task_of_the_recipes_has_its_packages(hardware):
    """`run.sh math_length` asks for no extra of its own."""
    text = (REPO / "pyproject.toml").read_text()
    (extras,) = re.findall(rf"^{hardware} = .*verl-gdpo\[(.*?)\]", text, re.M)
    assert {"math", "plots"} <= {*extras.split(",")}


def test_made_once(checkout):
    code, venv, _ = setup(checkout, "cpu")
    assert code == 0
    assert venv == (checkout / ".venv").resolve() and venv.name.startswith(".venv-cpu-")
    made = calls(checkout)
    # all of it is compiled on all cores, and not by pip on one
    installs = [line for line in made if "begin pip" in line and " install " in line]
    assert installs and all(" --no-compile " in line for line in installs)
    before = "\n".join(made).partition("compileall -qq -j 0")[0]
    assert before.count("end pip") == 3  # what installs, the others, and torch beside them
    assert setup(checkout, "cpu") == (0, venv, "")
    assert calls(checkout) == made


def test_a_verl_of_the_users_own_is_named_and_left_alone(checkout):
    """A checkout of verl's main branch is neither replaced by a release nor left out in silence."""
    own = 'case "$*" in *importlib.metadata*) echo "0.10.0.dev0 /mine/python3"; exit ;; esac\n'
    stand_in = checkout.parent / "bin" / "python3"
    program(stand_in, PYTHON.replace("#!/bin/bash\n", f"#!/bin/bash\n{own}"))
    for _ in range(2):  # also where the environment is there already
        code, _, said = setup(checkout, "gpu")
        line = "/mine/python3 has verl 0.10.0.dev0, which stays as it is and is not used"
        assert code == 0 and f"{line}; the environment here has verl 0.9.1." in said
        assert f"/mine/python3 -m pip install --no-deps --editable {checkout}\n" in said
    assert not any("/mine/" in call for call in calls(checkout))
    code, _, said = setup(checkout, "python", "gpu")
    assert (code, said) == (0, "")


def test_an_environment_in_use_is_left_alone_when_more_is_asked_for(checkout):
    _, first, _ = setup(checkout, "cpu")
    files = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    _, second, said = setup(checkout, "cpu", "dev")
    assert second != first and (checkout / ".venv").resolve() == second
    assert f"{first.name} stays: remove it if" in said
    assert files == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    # and .venv was the first until the second was whole
    during = [line for line in calls(checkout) if line.startswith("end")][-5:]
    assert {line.split()[2] for line in during} == {first.name}
    assert setup(checkout, "cpu")[1] == second  # which has all of it
    assert len([line for line in calls(checkout) if line.startswith("begin venv")]) == 2


def test_two_first_starts_make_one_environment(checkout):
    (checkout / "wait").touch()
    first = start(checkout, "cpu")
    wait_for(lambda: any(line.startswith("begin pip") for line in calls(checkout)))
    second = start(checkout, "cpu")
    assert "waiting for it" in second.stderr.readline()
    (checkout / "wait").unlink()
    assert first.communicate(timeout=60)[0] == second.communicate(timeout=60)[0] != ""
    assert [line.split()[:2] for line in calls(checkout)].count(["begin", "venv"]) == 1


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_half_an_environment_is_never_used(checkout, how):
    _, old, _ = setup(checkout, "cpu")
    (checkout / "wait").touch()
    count = len(calls(checkout))
    process = start(checkout, "cpu", "dev")
    wait_for(lambda: any(line.startswith("begin pip") for line in calls(checkout)[count:]))
    if how == "killed":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        (checkout / "fail").touch()
        (checkout / "wait").unlink()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert (checkout / ".venv").resolve() == old
    for name in ("wait", "fail"):
        (checkout / name).unlink(missing_ok=True)
    (half,) = {*checkout.glob(".venv-*")} - {old}
    (half / "left").touch()
    code, venv, _ = setup(checkout, "cpu", "dev")
    assert (code, venv) == (0, half)
    assert not (half / "left").exists()


@pytest.mark.parametrize("name", ["checkout", "a check out"])
def test_what_pip_unpacks_is_below_the_environment(checkout, monkeypatch, name):
    """Also where TMPDIR names nothing; and it is gone when the environment is made."""
    for stand_in in ("python3", "python3.12"):
        text = PYTHON.replace("  pip) ", "  pip) mktemp >>unpacked; ")
        program(checkout.parent / "bin" / stand_in, text)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout.parent / "cache"))
    checkout = checkout.rename(checkout.parent / name)
    code, venv, _ = setup(checkout, "cpu")
    assert code == 0
    unpacked = (checkout / "unpacked").read_text().splitlines()
    assert unpacked and {Path(path).parent for path in unpacked} == {venv / "tmp"}
    assert not (venv / "tmp").exists()


def test_a_folder_of_the_name_is_kept_beside(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").touch()
    code, venv, said = setup(checkout, "cpu")
    assert code == 0 and (checkout / ".venv").resolve() == venv
    (kept,) = checkout.glob(".venv.*/mine")
    assert f"the folder is {kept.parent.name} now" in said
    (checkout / ".venv").unlink()
    (checkout / ".venv").mkdir()
    made = calls(checkout)
    assert setup(checkout, "cpu")[:2] == (0, venv)
    assert calls(checkout) == made


def test_a_folder_of_the_name_in_use_is_not_touched(checkout):
    (checkout / ".venv").mkdir()
    library = checkout / ".venv" / "library.so"
    library.write_bytes(b"code")
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'rb'); "
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
        "print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, library], **pipes) as user:
        user.stdout.readline()
        assert setup(checkout, "cpu")[0] == 2
        assert library.exists() and calls(checkout) == []


def test_a_copied_or_moved_checkout_gets_an_environment_of_its_own(checkout):
    _, old, _ = setup(checkout, "cpu")
    copied, moved = checkout.with_name("copied"), checkout.with_name("moved")
    shutil.copytree(checkout, copied, symlinks=True)
    for place in (copied, checkout.rename(moved)):
        code, venv, _ = setup(place, "cpu")
        assert code == 0 and venv.parent == place and venv.name != old.name
        assert setup(place, "cpu") == (0, venv, "")  # and only once


# those of a shell, and two that are none
@pytest.mark.parametrize(
    ("sign", "is_moved"),
    [
        (" ", True),
        ("$", True),
        *(pytest.param(sign, True, marks=pytest.mark.slow) for sign in "'&(["),
        ("ü", False),
        pytest.param("+", False, marks=pytest.mark.slow),
    ],
)
def test_a_path_that_ray_gives_to_a_shell(checkout, monkeypatch, sign, is_moved):
    """The environment is where Ray can start its Python, and .venv leads to it."""
    cache = checkout.parent / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    odd = checkout.rename(checkout.with_name(f"check{sign}out"))
    (odd / ".venv-cpu-1").mkdir()  # as an earlier version made it
    code, venv, said = setup(odd, "cpu")
    assert code == 0 and venv == (odd / ".venv").resolve()
    assert venv.is_relative_to(cache if is_moved else odd) and str(venv / "install.log") in said
    assert setup(odd, "cpu") == (0, venv, "")
    if is_moved:
        (odd / ".venv").unlink()  # what it was then is never taken
        shutil.copytree(venv, odd / ".venv-cpu-1", dirs_exist_ok=True)
        (odd / ".venv").symlink_to(".venv-cpu-1")
        assert setup(odd, "cpu") == (0, venv, "") and (odd / ".venv").resolve() == venv
        second = shutil.copytree(odd, odd.with_name(f"second{sign}"), symlinks=True)
        assert setup(second, "cpu")[1].parent not in (venv.parent, second)


def test_no_place_that_ray_can_start_python_in(checkout, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout.parent / "a cache"))
    odd = checkout.rename(checkout.with_name("check out"))
    code, _, said = setup(odd, "cpu")
    assert code == 2 and "Ray starts no worker with a Python in a path like" in said
    assert "Set XDG_CACHE_HOME to a folder whose path has no space" in said
    assert not calls(odd) and not (checkout.parent / "a cache").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    code, _, said = setup(odd, "cpu")
    assert code == 2 and "and there is no HOME. Set HOME or XDG_CACHE_HOME to a folder" in said


def test_hashes_are_asked_of_all_but_torch_and_the_package(checkout):
    assert setup(checkout, "cpu", "dev")[0] == 0
    asked = [line.partition(" -m pip ")[2] for line in calls(checkout) if " -m pip " in line]
    first, *rest = [line.removeprefix("install --progress-bar off --no-compile ") for line in asked]
    assert first.startswith("--retries 1 --require-hashes --no-deps --requirement .venv-cpu-")
    rest = [line.removesuffix(" --disable-pip-version-check") for line in rest]
    assert [*sorted(rest[:2]), *rest[2:]] == [
        "--no-deps torch==2.13.0",  # beside the next
        "--require-hashes --no-deps --no-build-isolation --requirement=requirements/cpu.txt "
        "--requirement=requirements/dev.txt",
        "torch==2.13.0",
        "--no-deps --no-build-isolation --editable .",
        "check",
    ]


@pytest.mark.parametrize(
    ("call", "printed", "said"),
    [
        ("", "a: NewConnectionError(b)", "does not reach a package index; set PIP_INDEX_URL or"),
        ("", "ERROR: No space left on device", "No space left on device"),
        ("", "first\n" + "line\n" * 20 + "ERROR: last", "ERROR: last"),
        ("-torch", "ERROR: no torch", "ERROR: no torch"),
    ],
)
def test_what_pip_prints_goes_to_a_file_and_its_end_is_shown(checkout, call, printed, said):
    (checkout / f"fail{call}").write_text(printed)
    code, _, errors = setup(checkout, "cpu")
    assert code == 2 and said in errors
    assert "first" not in errors  # the last 15 lines, or one line
    (log,) = checkout.glob(".venv-cpu-*/install.log")
    assert printed in log.read_text() and str(log) in errors
    if "NewConnectionError" in printed:
        assert len(errors.splitlines()) == 2  # what is made, and why not


def test_torch_is_not_fetched_any_more_after_the_end(checkout, monkeypatch):
    (checkout / "wait-torch").touch()
    monkeypatch.setenv("OF_TEST", str(checkout))
    process = start(checkout, "cpu")
    wait_for(lambda: any("torch" in line for line in calls(checkout)))
    process.terminate()
    process.communicate(timeout=60)
    wait_for(lambda: not marked("OF_TEST", str(checkout)))


@pytest.fixture
def only_python(tmp_path, monkeypatch):
    """A PATH without Python, to which `only_python(version)` adds one."""
    folder = tmp_path / "only"
    folder.mkdir()
    for name in ("bash", "uname", "dirname", "touch", "readlink", "cat", "env"):
        (folder / name).symlink_to(shutil.which(name))

    def add(version):
        program(folder / "python3", f"#!/bin/sh\n[ $1 = -c ] && exit 1\necho Python {version}\n")

    monkeypatch.setenv("PATH", str(folder))
    return add


@pytest.mark.parametrize("version", [None, "3.13.1"])
def test_without_a_python_that_verl_supports(checkout, only_python, version):
    if version:
        only_python(version)
    code, _, errors = setup(checkout, "cpu")
    found = f"Python {version}" if version else "no Python"
    assert code == 2
    assert errors == (
        f"setup_env: found {found}, and verl needs 3.10, 3.11 or 3.12: install Python 3.12 so that "
        "python3.12 is on PATH, as with 'uv python install 3.12' or conda, and start again\n"
    )


def test_a_folder_that_cannot_be_written(checkout):
    (checkout / ".venv.lock").symlink_to(checkout / "missing" / "lock")  # the tests may run as root
    code, _, errors = setup(checkout, "cpu")
    assert code == 2 and len(errors.splitlines()) == 1
    assert f"cannot write to {checkout}" in errors and "cp -r" in errors


def test_an_unknown_extra(checkout):
    usage = "usage: ./setup_env.sh cpu|gpu [dev] [flash-attn], or cpu vllm; got 'cpu plots'"
    assert usage in setup(checkout, "cpu", "plots")[2]


def test_environments_asked_for_in_turns_are_made_once_each(checkout):
    """vLLM without a GPU has pins of its own."""
    asked_for = [("cpu",), ("cpu", "vllm"), ("gpu",)]
    folders = [setup(checkout, *extras)[1] for extras in asked_for]
    assert len({*folders}) == 3 and (checkout / ".venv").resolve() == folders[2]
    asked = [line for line in calls(checkout) if "--requirement" in line]
    names = [re.search(r"requirements/(\w+).txt", line)[1] for line in asked[1::2]]
    assert names == ["cpu", "cpu_vllm", "gpu"]
    # vLLM asks for packages that are left out
    assert sum(line.startswith("begin pip") and " check" in line for line in calls(checkout)) == 2
    made = calls(checkout)
    assert [setup(checkout, *extras)[1] for extras in asked_for] == folders
    assert calls(checkout) == made and (checkout / ".venv").resolve() == folders[2]


def pinned(*names):
    """[(name, version, marker, number of hashes)]"""
    text = "".join((REPO / "requirements" / f"{name}.txt").read_text() for name in names)
    entries = re.findall(r"^([^#\s]\S*?)==(\S+)(?: ; (.*?))? \\\n((?:    .*\n)+)", text, re.M)
    assert len(entries) == len(re.findall(r"^\S+==", text, re.M))
    return [(*about, rest.count("sha256:")) for *about, rest in entries]


@pytest.mark.parametrize("extras", [("cpu",), ("gpu",), ("cpu", "dev"), ("gpu", "dev")])
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_the_pins_fit_the_requirements(extras, python):
    """Else `nox -s pins` was forgotten."""
    project = pytest.importorskip("tomllib").loads((REPO / "pyproject.toml").read_text())["project"]
    where = {"python_version": python, "python_full_version": f"{python}.9"}
    pins = {}
    for name, version, marker, hashes in pinned(*extras):
        assert hashes, name
        if not marker or Marker(marker).evaluate(where):
            assert pins.setdefault(name, version) == version
    if extras[0] == "cpu":
        assert "torch" not in pins
        pins["torch"] = "2.13.0"
    asked, open_extras, seen = [*project["dependencies"]], [*extras], set()
    while open_extras:
        extra = open_extras.pop()
        if extra not in seen:
            seen.add(extra)
            for text in project["optional-dependencies"][extra]:
                if (wanted := Requirement(text)).name == project["name"]:
                    open_extras += wanted.extras
                else:
                    asked.append(text)
    for wanted in map(Requirement, asked):
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)], prereleases=True)
