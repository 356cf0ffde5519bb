"""The file of a reward function is a module, which other processes import by its name."""

import json
import logging
import subprocess
import sys

import pytest

from verl_gdpo.scoring import reward_file
from verl_gdpo.scoring.reward_file import load

FILE = """
from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import its_helper


@dataclass
class Length:
    value: int
    most: int = its_helper.MOST


def length(text: str) -> Length:
    return Length(len(text))


def lengths(method: str, texts: list[str]) -> list[int]:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return [each.value for each in pool.map(length, texts)]
"""
# a process that has loaded nothing, in another folder than the file
RUN = """
import json
import sys

from verl_gdpo.scoring.reward_file import load

if __name__ == "__main__":
    path, *methods = sys.argv[1:]
    module = load(path)
    results = [module.lengths(method, ["a", "bb"]) for method in methods]
    print(json.dumps([module.__name__, results]))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the file's helper."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "its_helper.py").write_text("MOST = 10\n")
    return folder


def written(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def private_name(path):
    quoted = str(path).replace("/", "%2F").replace(".", "%2E")
    return f"verl_gdpo.scoring.reward_file.{quoted}"


ALL_WAYS = ["fork", "spawn", "forkserver"]  # in which a pool starts its processes


@pytest.mark.parametrize(
    ("name", "is_private", "ways"),
    [
        ("my_rewards.py", False, ALL_WAYS),
        ("my-rewards.py", False, ["spawn"]),  # no identifier, but Python finds it
        ("json.py", True, ALL_WAYS),
        ("v1.rewards.py", True, ["spawn"]),
        ("größe 1.py", False, ["spawn"]),
    ],
)
def test_pools_dataclasses_and_helpers_work(folder, tmp_path, name, is_private, ways):
    path = written(folder / name, FILE)
    script = written(tmp_path / "run.py", RUN)
    done = subprocess.run(
        [sys.executable, script, path, *ways],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected = private_name(path) if is_private else path.stem
    assert json.loads(done.stdout) == [expected, [[1, 2]] * len(ways)]


def test_the_same_file_is_one_module(folder, monkeypatch):
    path = written(folder / "my_rewards.py", FILE)
    module = load(str(path))
    monkeypatch.chdir(folder)
    (folder.parent / "link").symlink_to(folder)
    again = [load("my_rewards.py"), load(f"file://{path}"), load(f"{folder}/../link/my_rewards.py")]
    assert all(each is module for each in again)
    assert sys.modules["my_rewards"] is module and module.Length(3).most == 10


def test_a_file_that_python_finds_already_is_imported_once(folder, monkeypatch):
    path = written(folder / "my_rewards.py", FILE)
    monkeypatch.syspath_prepend(folder)
    import my_rewards

    before = list(sys.path)
    assert load(str(path)) is my_rewards and sys.path == before


def test_files_with_one_stem_are_two_modules(tmp_path, caplog):
    first = written(tmp_path / "a" / "my_rewards.py", "X = 1\n")
    second = written(tmp_path / "b" / "my_rewards.py", "X = 2\n")
    with caplog.at_level(logging.WARNING):
        modules = [load(str(path)) for path in (first, second, second, first)]
    assert [module.X for module in modules] == [1, 2, 2, 1]
    assert modules[0] is modules[3] is sys.modules["my_rewards"]
    assert modules[1] is modules[2] is sys.modules[private_name(second)]
    (line,) = caplog.messages
    assert line.startswith(
        f"verl-gdpo: {second} is the module {private_name(second)}, because `import my_rewards` "
    )


@pytest.mark.parametrize("name", ["json", "colorsys", "pip", "__main__", "its_data"])
def test_nothing_that_has_the_name_is_replaced(folder, monkeypatch, name):
    """Whether it was imported or not. A folder of data is nothing that has a name."""
    (folder.parent / "its_data").mkdir()
    monkeypatch.syspath_prepend(folder.parent)
    before = dict(sys.modules)
    module = load(str(written(folder / f"{name}.py", "X = 1\n")))
    assert module.X == 1
    assert (module.__name__ == name) is (name == "its_data")
    assert {each: sys.modules[each] for each in before} == before
    assert sys.path[-1] == str(folder)


def test_a_module_of_a_package_is_imported():
    assert load("pkg://verl_gdpo/scoring/lengths") is load("pkg://verl_gdpo.scoring.lengths")
    assert load("pkg://verl_gdpo.scoring.lengths") is sys.modules["verl_gdpo.scoring.lengths"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("my_rewards.py", "X = 1\nX / 0\n", r"ZeroDivisionError: division by zero \[{path}:2\]"),
        ("json.py", "X = 1\nX / 0\n", r"ZeroDivisionError: division by zero \[{path}:2\]"),
        ("my_rewards.py", "X = (\n", r"SyntaxError: '\(' was never closed \[{path}:1\]"),
        ("my_rewards.py", "import sys\n\nsys.exit(3)", r"SystemExit: 3 \[{path}:3\]"),
        (
            "my_rewards.py",
            "import nothing_x",
            r"ModuleNotFoundError: No .*'nothing_x' \[{path}:1\]",
        ),
        ("my_rewards.py", "from . import x", r"ImportError: attempted relative .* \[{path}:1\]"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(folder, name, text, message):
    path = written(folder / name, text)
    before = set(sys.modules)
    expected = f"^{path}: cannot be imported: " + message.replace("{path}", str(path))
    for _ in range(2):
        with pytest.raises(ValueError, match=expected):
            load(str(path))
    assert not {"my_rewards", private_name(path)} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.py", r"^gone.py: no such file \(looked for /.*/gone.py\)"),
        ("rewards", "^rewards: no such file"),
        ("notes.txt", "^notes.txt: got no Python file; expected a name that ends in .py"),
        ("pkg://gone_x", "^pkg://gone_x: cannot be imported: ModuleNotFoundError: .*'gone_x'$"),
    ],
)
def test_what_is_no_module(folder, monkeypatch, path, message):
    written(folder.parent / "notes.txt", "")
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_ray_sends_what_the_file_defines_with_its_code(folder):
    """A process of Ray has another path, and could not import the module by its name."""
    from ray import cloudpickle

    module = load(
        str(
            written(
                folder / "my_rewards.py", "def f():\n    return Row()\n\nclass Row:\n    x = 1\n"
            )
        )
    )
    sent = cloudpickle.dumps([module.f, module.Row])
    del sys.modules["my_rewards"]
    sys.path.remove(str(folder))
    function, row = cloudpickle.loads(sent)
    assert function().x == row.x == 1


def test_the_loader_is_light():
    """A spawned child may import it for a private name."""
    code = (
        "import sys, verl_gdpo.scoring.reward_file\n"
        "print({'numpy', 'torch', 'verl'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
    assert reward_file.__path__ == []
