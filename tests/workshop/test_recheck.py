"""The script that computes the verdicts again finds what is wrong, and imports nothing of ours."""

import ast
import shutil
import subprocess
import sys

import numpy as np
import pytest
from repository import REPO

from workshop.experiments import recheck

SCRIPT = REPO / "workshop/experiments/recheck.py"


def test_it_imports_nothing_of_ours():
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported - {*sys.stdlib_module_names} == {"numpy", "scipy"}


def test_the_pages_have_the_verdicts_of_the_files(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert "trainer: 7 comparisons; 4 claims" in done.stdout
    assert "0 differ from the pages" in done.stdout


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The files that the script reads, to be changed."""
    here, docs = tmp_path / "workshop/experiments", tmp_path / "docs"
    for part in ("map/data", "trainer/data", "trainer/data_2"):
        shutil.copytree(recheck.HERE / part, here / part)
    docs.mkdir()
    for page in ("in_verls_trainer.md", "when_gdpo_helps.md"):
        shutil.copyfile(recheck.DOCS / page, docs / page)
    shutil.copytree(recheck.DOCS / "when_gdpo_helps", docs / "when_gdpo_helps")
    monkeypatch.setattr(recheck, "HERE", here)
    monkeypatch.setattr(recheck, "DOCS", docs)
    return tmp_path


def test_a_wrong_number_is_found(copied, capsys):
    page = copied / "docs/in_verls_trainer.md"
    page.write_text(page.read_text().replace("+0.341 [+0.241, +0.441]", "+0.351 [+0.241, +0.441]"))
    assert recheck.main() == 1
    assert "'20_to_1', 'grpo'): the page says [0.351" in capsys.readouterr().err


def test_a_wrong_verdict_of_the_simulation_is_found(copied, capsys):
    page = copied / "docs/when_gdpo_helps/all_settings.md"
    lines = page.read_text().splitlines()
    [place] = [k for k, line in enumerate(lines) if line.startswith("| two, 20:1 |")]
    cells = lines[place].split("|")
    cells[5] = " less "
    lines[place] = "|".join(cells)
    page.write_text("\n".join(lines))
    assert recheck.main() == 1
    assert "two, 20:1, grpo: the page says 'less'" in capsys.readouterr().err


def test_a_wrong_count_of_another_estimator_is_found(copied, capsys):
    page = copied / "docs/when_gdpo_helps.md"
    lines = page.read_text().splitlines()
    [place] = [k for k, line in enumerate(lines) if line.startswith("| `dara` |")]
    cells = lines[place].split("|")
    cells[3] = f" {int(cells[3]) + 1} "
    lines[place] = "|".join(cells)
    page.write_text("\n".join(lines))
    assert recheck.main() == 1
    assert "dara: the page says" in capsys.readouterr().err


def test_what_survives_a_permutation():
    """Of five alike differences, all 31 other choices of signs but the opposite one lose."""
    alike = np.array([0.30, 0.31, 0.30, 0.31, 0.30])
    assert recheck.surviving(alike, critical=4.6) == pytest.approx(1 / 31)
    # a claim that chance makes often is one that survives
    assert list(recheck.check_survival("x", [0.2])) != []
    assert list(recheck.check_survival("x", [1 / 31])) == []
