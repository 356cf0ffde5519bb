"""A reward function may change what it gets: it has a copy of its own."""

import sys
from collections import defaultdict

import numpy as np
import pytest
from listed_functions import config_of, manager_of
from reward_rows import scored

from verl_gdpo.scoring.own_copy import own_copy

pytestmark = pytest.mark.usefixtures("event_loop")


CHANGING = """
seen = []

def changes(prompt, ground_truth, extra_info, words):
    seen.append([prompt, ground_truth, extra_info["box"], extra_info["lists"]])
    words.append("more")
    value = float(len(words) + len(ground_truth) + prompt[0]["content"].count("A"))
    value += float(extra_info["lists"][0].sum() + extra_info["array"].sum())
    prompt[0]["content"] = prompt[0]["content"].lower()
    prompt.append({"role": "user", "content": "x"})
    ground_truth.clear()
    extra_info["lists"][0][:] = 0
    extra_info["array"] *= 0
    extra_info["new"] = 1
    return value

def changes_group(prompt, ground_truth, extra_infos, words):
    return [changes(prompt, ground_truth, each, words) for each in extra_infos][:1]
"""


class Box:
    """Something that is no container, such as an image."""


def changeable(box):
    return {
        "truth": ["4", "2"],
        "raw_prompt": np.array([{"role": "user", "content": "AAA"}], dtype=object),
        "extra_info": {
            "box": box,
            "lists": [np.ones(3)],
            "array": np.arange(2.0),
        },
    }


@pytest.mark.parametrize("name", ["changes", "changes_group"])
def test_what_a_function_changes_is_its_own(tmp_path, name):
    """The others of the row see nothing of it, and neither does its own next call."""
    path = tmp_path / "changing_rewards.py"
    path.write_text(CHANGING)
    entry = {"path": str(path), "name": name, "group": name == "changes_group", "words": ["a"]}
    manager = manager_of(config_of({each: dict(entry) for each in ("a", "b", "c")}))
    box, expected = Box(), 2.0 + 2.0 + 3.0 + 3.0 + 1.0
    for _ in range(2):
        info = scored(manager, **changeable(box))["reward_extra_info"]
        assert info == {"a": expected, "b": expected, "c": expected, "score": 3 * expected}
    seen = sys.modules["changing_rewards"].seen
    assert len(seen) == 6 and all(each[2] is box for each in seen)


def test_a_function_alone_has_its_own_copy_too(tmp_path):
    """The row is read again after it, for the dump and for the criteria of a rubric."""
    path = tmp_path / "changing_rewards.py"
    path.write_text(CHANGING)
    entry = {"path": str(path), "name": "changes", "words": ["a"]}
    config = config_of({"a": entry, "b": {**entry, "sources": ["another"]}})
    fields = changeable(Box())
    assert scored(manager_of(config), **fields)["reward_extra_info"]["a"] == 11.0
    ((_, truth, _, lists),) = sys.modules["changing_rewards"].seen
    assert truth is not fields["truth"] and lists is not fields["extra_info"]["lists"]


def test_copies_have_the_shape_of_the_value():
    inner = [1]
    value = {
        "twice": [inner, inner],
        "default": defaultdict(list, x=inner),
        "objects": np.array([inner, None], dtype=object),
        "tuple": (inner,),
    }
    value["itself"] = value
    copied = own_copy(value)
    assert copied["twice"][0] is copied["twice"][1] is copied["objects"][0]
    assert copied["twice"][0] == [1] and copied["twice"][0] is not inner
    assert copied["default"]["y"] == [] and "y" not in value["default"]
    assert copied["itself"] is copied and copied["tuple"][0] is inner
