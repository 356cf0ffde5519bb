"""The questions of the package, and what happens without it."""

import sys
from importlib import metadata

import pytest

from verl_gdpo.evaluation.bfcl import data


@pytest.mark.parametrize("found", [None, "2026.3.23"])
def test_a_missing_package_and_another_version_are_one_line(monkeypatch, found):
    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(data.metadata, "version", version)
    for ask in (lambda: data.rows("simple"), data.ast_checker, data.documents):
        with pytest.raises(
            ValueError, match=r"pip install --no-deps bfcl-eval==2025\.6\.8"
        ) as said:
            ask()
        assert (found or "missing") in str(said.value) and "\n" not in str(said.value)


def test_the_questions_have_different_names():
    rows = {category: data.rows(category) for category in data.CATEGORIES}
    ids = [row["id"] for of_category in rows.values() for row in of_category]
    assert len(ids) == len({*ids}) == 4441
    # the package has two of this name
    assert [one for one in ids if one.startswith("live_relevance_3-3-0")] == [
        "live_relevance_3-3-0",
        "live_relevance_3-3-0.2",
    ]
    live = sum(len(rows[category]) for category in data.GROUPS["live"])
    system = [
        row["id"]
        for of_category in rows.values()
        for row in of_category
        if any(message["role"] == "system" for turn in row["question"] for message in turn)
    ]
    assert (live, len(system)) == (2251, 92)
    assert all(bool(row["ground_truth"]) for row in rows["simple"] + rows["multi_turn_base"])


def test_hints_about_the_language_are_for_the_prompt_alone():
    java = data.rows("java")[1]["function"]
    kinds = {one["type"] for one in java[0]["parameters"]["properties"].values()}
    assert "boolean" in kinds
    (hinted,) = data.with_hints(java, "java")
    assert hinted["description"].endswith("in Java 8 SDK syntax.")
    assert {one["type"] for one in hinted["parameters"]["properties"].values()} == {"string"}
    assert java == data.rows("java")[1]["function"]
    assert data.with_hints([], "live_irrelevance") == []


def test_the_clients_of_providers_are_neither_imported_nor_left_behind():
    data.ast_checker()
    data.with_hints(data.rows("simple")[0]["function"], "simple")
    assert not {*data._UNUSED} & {*sys.modules} - {"tenacity"}
    for name in data._UNUSED:
        assert name == "tenacity" or name.startswith("bfcl_eval.")


def test_categories_are_chosen_by_name_and_by_group():
    assert data.chosen(["live_simple", "java", "non_live"]) == [
        *data.GROUPS["non_live"],
        "live_simple",
    ]
    assert data.chosen(data.GROUPS) == [*data.CATEGORIES]
    with pytest.raises(ValueError, match="got 'python'; expected one of non_live, live, multi_tu"):
        data.chosen(["python"])
