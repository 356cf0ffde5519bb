"""The README is true: its code runs, and its file map and settings are those of the package."""

import re
from dataclasses import fields

import yaml
from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet
from tracked import REPO, tracked_files

from verl_gdpo import SUPPORTED_VERL
from verl_gdpo.advantage.variants import VARIANTS
from verl_gdpo.settings.algorithm import KEYS, GdpoSettings
from verl_gdpo.settings.dialects import DIALECTS
from verl_gdpo.settings.reward_terms import Condition, RewardTerm
from verl_gdpo.verl_hooks.supported_trainers import REFUSED, TRAINERS

README = (REPO / "README.md").read_text()


def executed_blocks():
    blocks = re.findall(r"<!-- executed by .*? -->\n```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == README.count("```python")
    return blocks


def test_the_reward_example():
    names = {}
    exec(executed_blocks()[0], names)
    extra_info = {"response_tokens": 201}
    assert names["compute_score"]("any", " 4 ", "4", extra_info) == {"correct": 1.0, "short": 0.0}


def test_the_estimator_example(capsys):
    block = executed_blocks()[1]
    exec(block, {})
    expected = re.search(r"# (tensor\(.*\))", block)[1]
    assert capsys.readouterr().out.strip() == expected


def test_the_file_map_is_the_tree():
    mapped = set(re.findall(r"^\| `([^`]+)` \|", README.split("## Where to find what")[1], re.M))
    for path in mapped:
        assert (REPO / path).exists(), path
    files = {"/".join(path.parts) for path in tracked_files()}
    modules = {file for file in files if re.match(r"verl_gdpo/.*(?<!/__init__)\.py$", file)}
    modules -= {"verl_gdpo/__init__.py"}
    folders = {file.split("/")[0] + "/" for file in files if "/" in file} - {"verl_gdpo/"}
    folders = {folder for folder in folders if not folder.startswith(".")}
    scripts = {file for file in files if "/" not in file and file.endswith(".sh")}
    rooms = {path for path in mapped if path.endswith("/")}
    in_rooms = {file for file in modules if any(file.startswith(room) for room in rooms)}
    assert mapped - rooms == (modules - in_rooms) | scripts
    assert folders <= rooms
    assert all(any(file.startswith(room) for file in modules) for room in rooms - folders)


def test_the_settings_table_is_the_code():
    table = README.split("## Settings")[1].split("verl's `algorithm.gdpo_reward_keys`")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)`", table, re.M))
    defaults = GdpoSettings()
    assert rows.pop("rewards") == "null" and defaults.rewards is None
    assert rows.pop("normalize_by_std") == "null"
    assert rows.pop("batch_eps") == "null" and defaults.batch_eps is None
    assert rows.pop("combine") == "sum" and defaults.combine is None
    assert rows.pop("dialect") == "null"
    names = {"group_norm", "batch_norm", "eps", "batch_var_eps"}
    assert {name: type(getattr(defaults, name))(value) for name, value in rows.items()} == {
        name: getattr(defaults, name) for name in names
    }
    assert {field.name for field in fields(GdpoSettings)} == {*KEYS} - {"dialect"} | {"bounds"}


def rows_after(header):
    table = README.split(header)[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_variants():
    rows = rows_after("| `name` |")
    assert [row[0] for row in rows] == list(VARIANTS)
    for name, _, _, _, source in rows:
        (arxiv,) = re.findall(r"abs/([\d.]+)", source)
        assert f"arXiv {arxiv}" in VARIANTS[name].__doc__


def test_the_table_of_dialects():
    keys = ["group_norm", "batch_norm", "eps", "batch_eps", "batch_var_eps", "normalize_by_std"]
    rows = rows_after("| `dialect` | `group_norm` |")
    assert [row[0] for row in rows] == list(DIALECTS)
    for name, *values, _ in rows:
        read = {k: yaml.safe_load(v) for k, v in zip(keys, values, strict=True)}
        # YAML takes 1e-6 for a string
        read |= {key: float(read[key]) for key in ("eps", "batch_var_eps")}
        assert read == DIALECTS[name]


def test_the_rewards_example_is_read():
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    settings = GdpoSettings.from_algorithm(OmegaConf.create(block).algorithm)
    assert settings.rewards == {
        "correctness": RewardTerm(1.0),
        "length": RewardTerm(0.5, Condition("correctness", 1.0), "zero"),
        "format": RewardTerm({0: 1.0, 100: 0.5}),
    }


def test_the_supported_range_is_the_same_everywhere():
    assert f'"verl{SUPPORTED_VERL}"' in (REPO / "pyproject.toml").read_text()


def test_the_support_table_is_the_code():
    table = README.split("## Supported versions and trainers")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)`[^|]* \| ([^|]+) \|", table, re.M))
    refused = {trainer for trainer, versions in rows.items() if versions == "refused"}
    assert refused == set(REFUSED)
    works = {t: tuple(rows[t].split(", ")) for t in rows if t not in refused}
    assert works == dict(TRAINERS)


def test_the_versions_in_the_table_are_tested():
    """By nox, by the default tests on what is pinned, and by one run of them on verl 0.9.0."""
    named = {version for versions in TRAINERS.values() for version in versions}
    by_nox = set(re.findall(r'^    "([\d.]+)": ', (REPO / "noxfile.py").read_text(), re.M))
    pinned = re.findall(r"^verl==([\d.]+)$", (REPO / "requirements/cpu.txt").read_text(), re.M)
    assert named == by_nox | {*pinned}
    assert all(version in SpecifierSet(SUPPORTED_VERL) for version in named)
