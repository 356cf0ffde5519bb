"""What a first release needs: one address, metadata that follow it, and workflows that tell."""

import datetime
import os
import re
import subprocess

import pytest
import yaml
from pages import FILES, PAGES
from repository import REPO

from noxfile import with_absolute_links, with_addresses
from verl_gdpo import __version__
from verl_gdpo.terminal import ADDRESS, install_line

WORKFLOWS = {
    name: yaml.safe_load((REPO / name).read_text())
    for name in FILES
    if name.startswith(".github/workflows/")
}


def test_one_constant_decides_how_the_package_is_installed():
    installs = {line for text in PAGES.values() for line in re.findall(r"pip install '.*?'", text)}
    extras = {re.search(r"\[(.*)\]'", line)[1] for line in installs}
    assert len(extras) > 2 and installs == {*map(install_line, extras)}


def without_a_slash(text):
    """What the lines `pip install ..` of a text install with an extra of ours, by a bare name."""
    project = (REPO / "pyproject.toml").read_text()
    table = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = re.findall(r"^([a-z-]+) = \[", table, re.M)
    with_an_extra = rf"([^\s'\"`]+)\[(?:{'|'.join([*extras, 'EXTRA'])})[\w,-]*\]"
    found = []
    for line in text.splitlines():
        if "pip install" in line:
            found += [name for name in re.findall(with_an_extra, line) if "/" not in name]
    return found


def test_no_text_installs_our_folder_by_a_bare_name():
    """pip takes the bare name of a folder for that of a package of the index."""
    assert without_a_slash("pip install 'repo[verl,plots]'  # here") == ["repo"]
    assert without_a_slash("pip install './repo[verl,plots]'") == []
    for name in FILES - {"tests/repository/test_publishing.py"}:
        if (REPO / name).is_file():
            text = (REPO / name).read_text(errors="ignore")
            assert without_a_slash(text) == [], name
    assert bool(ADDRESS) or "/" in install_line("verl")


def test_the_changelog_dates_the_version():
    version, date = re.search(r"^## (\S+) \((.*)\)$", PAGES["CHANGELOG.md"], re.M).groups()
    assert version == __version__ and datetime.date.fromisoformat(date)


def test_an_index_gets_no_relative_link():
    text = PAGES["README.md"]
    assert with_absolute_links(text, "", "1.0") == text
    made = with_absolute_links(text, "https://here", "1.0")
    files = re.findall(r"!\[[^]]*\]\(https://here/raw/v1.0/([^)]*)\)", made)
    pages = re.findall(r"\]\(https://here/blob/v1.0/([^)#]*)", made)
    assert {*files} | {*pages} <= FILES and files and len(pages) > 20
    assert not re.findall(r"\]\((?!https?:|#)", made)


def test_an_index_gets_the_addresses_of_one_constant():
    text = (REPO / "pyproject.toml").read_text()
    assert with_addresses(text, "", "1.0") == text
    toml = pytest.importorskip("tomllib")
    urls = toml.loads(with_addresses(text, "https://here", "1.0"))["project"]["urls"]
    assert urls["Homepage"] == urls["Repository"] == "https://here"
    assert urls["Changelog"] == "https://here/blob/v1.0/CHANGELOG.md"
    assert urls["Documentation"] == "https://here/tree/v1.0/docs"
    assert urls["Issues"] == "https://here/issues"
    assert "Paper" in urls


def test_a_workflow_may_read_and_three_jobs_more():
    rights = {"tell": {"issues": "write"}, "publish": {"contents": "read", "id-token": "write"}}
    rights["site"] = {"pages": "write", "id-token": "write"}
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {}
        for job, what in workflow["jobs"].items():
            assert what["permissions"] == rights.get(job, {"contents": "read"})


def test_the_site_is_published_from_where_nox_makes_it():
    build, site = WORKFLOWS[".github/workflows/site.yml"]["jobs"].values()
    *_, made, sent = build["steps"]
    assert made["run"] == "python -m nox --session site"
    assert sent["with"]["path"] == ".nox/site/tmp/site/site"
    assert site["needs"] == "build"


GH = """gh() { echo "$*" >> "$CALLS"; case $2 in list) echo "$OPEN" ;; esac; }
"""


@pytest.mark.parametrize(("number", "call"), [("", "issue create"), ("7", "issue comment 7")])
def test_the_canary_opens_one_issue(tmp_path, number, call):
    (step,) = WORKFLOWS[".github/workflows/canary.yml"]["jobs"]["tell"]["steps"]
    env = {"VERSION": "0.11.0.dev at abc", "RUN": "https://run", "OPEN": number}
    env |= {"PATH": os.environ["PATH"], "CALLS": str(tmp_path / "calls")}
    subprocess.run(["bash", "-e", "-c", GH + step["run"]], env=env, check=True)
    listed, told = (tmp_path / "calls").read_text().split("\n", 1)
    assert listed.startswith("issue list --state open")
    assert told.startswith(call) and "0.11.0.dev at abc does not pass: https://run" in told


def test_the_canary_trains():
    steps = WORKFLOWS[".github/workflows/canary.yml"]["jobs"]["newest_verl"]["steps"]
    ((file, name),) = re.findall(r"(tests/\S+)::(\w+)", "\n".join(s.get("run", "") for s in steps))
    training = (REPO / file).read_text().split(f"def {name}(")[1].split("\ndef ")[0]
    assert '"trainer.total_training_steps=2"' in training
