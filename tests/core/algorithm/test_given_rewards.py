"""Each form in which `compute_gdpo_advantage` takes rewards, and what it says of wrong ones."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields

import numpy as np
import oracle
import pytest
import torch

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.settings import Options

CORRECT = [1.0, 0.0, 1.0, 0.5, 0.25, 0.75]
SHORT = [0.0, 1.0, None, 1.0, 0.0, None]
GROUPS = ["p", "p", "p", "q", "q", "q"]
MASK = [[1, 1]] * 6
ROWS = [[correct, short] for correct, short in zip(CORRECT, SHORT, strict=True)]
SAMPLES = [{"correct": correct, "short": short} for correct, short in ROWS]
THERE = [[True, short is not None] for short in SHORT]
# Where a reward is not present, any number may stand.
NUMBERS = [[correct, 7.0 if short is None else short] for correct, short in ROWS]
EXPECTED = oracle.gdpo(NUMBERS, GROUPS, present=THERE)


def advantages(rewards, **options):
    return compute_gdpo_advantage(rewards, GROUPS, MASK, **options)[:, 0].tolist()


def reversed_array(rows, dtype):
    """The rows as an array whose strides are negative."""
    return np.array(rows[::-1], dtype=dtype)[::-1]


def read_only(rows):
    array = np.array(rows)
    array.flags.writeable = False
    return array


FORMS = {
    "nested lists with None": (ROWS, {}),
    "tuples": (tuple(map(tuple, ROWS)), {}),
    "an array of objects": (np.array(ROWS, dtype=object), {}),
    "objects with negative strides": (reversed_array(ROWS, object), {}),
    "numbers with negative strides": (reversed_array(NUMBERS, np.float64), {"present": THERE}),
    "float16 of another byte order": (np.array(NUMBERS).astype(">f2"), {"present": THERE}),
    "an array that is read-only": (read_only(NUMBERS), {"present": THERE}),
    "an array in the order of columns": (np.asfortranarray(NUMBERS), {"present": THERE}),
    "a masked array": (np.ma.array(NUMBERS, mask=~np.array(THERE)), {}),
    "a tensor": (torch.tensor(NUMBERS), {"present": torch.tensor(THERE)}),
    "a tensor with a gradient": (torch.tensor(NUMBERS, requires_grad=True), {"present": THERE}),
    "a list of tensors": (list(torch.tensor(NUMBERS)), {"present": THERE}),
    "columns as lists": ({"correct": CORRECT, "short": SHORT}, {}),
    "columns of several kinds": (
        {"correct": torch.tensor(CORRECT), "short": np.array(SHORT, dtype=object)},
        {},
    ),
    "columns as tensors": (
        {"correct": torch.tensor(CORRECT), "short": torch.tensor(NUMBERS)[:, 1]},
        {"present": {"short": [short is not None for short in SHORT]}},
    ),
    "a dict for each sample": (SAMPLES, {}),
    "dicts in an array, as verl has them": (np.array(SAMPLES, dtype=object), {}),
    "dicts of numpy's numbers": (
        [{"correct": np.float64(correct), "short": short} for correct, short in ROWS],
        {},
    ),
    "dicts of tensors": (
        [{"correct": torch.tensor(correct), "short": short} for correct, short in ROWS],
        {},
    ),
    "dicts with text and a score": (
        [
            {"score": correct + (short or 0), "pred": "42", "correct": correct, "short": short}
            for correct, short in ROWS
        ],
        {},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_advantages(form):
    rewards, options = FORMS[form]
    assert advantages(rewards, **options) == pytest.approx(EXPECTED, abs=2e-6)


def test_masks_and_ids_of_any_kind():
    mask = np.array(MASK[::-1], dtype=object)[::-1]
    valid = np.array([True] * 6, dtype=object)[::-1]
    weights = np.array([2.0, 1.0])[::-1]
    actual = compute_gdpo_advantage(
        ROWS, np.array(GROUPS, dtype=object), mask, valid_B=valid, weights=weights
    )
    assert actual[:, 0].tolist() == pytest.approx(advantages(ROWS, weights=[1.0, 2.0]))


@pytest.mark.parametrize("rewards", [SAMPLES, {"correct": CORRECT, "short": SHORT}])
def test_weights_by_name_choose_and_order(rewards):
    both = advantages(rewards, weights={"short": 3.0, "correct": 1.0})
    assert both == pytest.approx(advantages(ROWS, weights=[1.0, 3.0]))
    alone = advantages(rewards, weights={"correct": 1.0})
    assert alone == pytest.approx(advantages([[correct] for correct in CORRECT]))


def test_columns_of_float32_are_known_to_float32():
    """Two rewards that cancel leave what float32 rounds away, as in a matrix of float32."""
    a = torch.tensor([0.1, 0.7, 0.3, 0.3, 0.9, 0.2])
    columns = {"a": a, "not_a": 1 - a}
    assert advantages(columns) == advantages(torch.stack([a, 1 - a], dim=1)) == [0.0] * 6


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([[1.0, "yes"]] * 6, {}, r"rewards_BK\[0, 1\] is 'yes'; expected a finite number"),
        ([[1.0, None], *[[1.0]] * 5], {}, "rewards_BK: expected lists of the same length"),
        ([[1.0], *[[None]] * 4, [np.nan]], {}, r"rewards_BK\[5, 0\] is nan"),
        ({"a": [0.0] * 5 + [np.nan]}, {}, "reward 'a' of sample 5 is nan"),
        ({"a": [0.0] * 5}, {}, r"reward 'a': expected 6 values, .* got shape \(5,\)"),
        ({"a": 1.0}, {}, "'a' is a float; expected a value for each sample"),
        ({"a": ["x"] * 6}, {}, "expected at least one reward, .* names .'a'."),
        ([{"a": 1.0}] * 5 + [{"b": 1.0}], {}, "sample 5 has no reward 'a', but .'b'."),
        ([{"a": 1.0}] * 5 + [None], {}, "sample 5 is a NoneType, and others are dicts"),
        ([{"a": 1.0}] * 5 + [{"a": "no"}], {}, "reward 'a' of sample 5 is 'no'"),
        ([{"a": 1.0}] * 5, {}, "reward 'a': expected 6 values"),
        (SAMPLES, {"weights": {"shrt": 1.0}}, "no reward 'shrt'; did you mean 'short'"),
        (ROWS, {"weights": {"short": 1.0}}, "weights: got names, .'short'., but .* a matrix"),
        (ROWS, {"present": {"short": [True] * 6}}, "present: got names"),
        (SAMPLES, {"present": {"shrt": [True] * 6}}, "present: there is no reward 'shrt'"),
        (SAMPLES, {"present": {"short": [True]}}, "present: expected 6 values for 'short'"),
        (SAMPLES, {"present": [[True]] * 6}, r"present: expected shape \(6, 2\), got \(6, 1\)"),
        (
            [{"score": 1.0, "a": 1.0}] * 5 + [{"score": 0.5, "a": 1.0}],
            {},
            r"sample 5 has score=0.5, which is not the sum of .* weights={'a': 1.0}",
        ),
    ],
)
def test_wrong_rewards_are_named(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        advantages(rewards, **options)


def test_padding_may_hold_anything_that_is_a_number():
    rewards = {"correct": [*CORRECT[:5], np.nan], "short": [0.0, 1.0, 0.5, 1.0, 0.0, np.inf]}
    with_padding = advantages(rewards, valid_B=[True] * 5 + [False])
    assert with_padding[5] == 0.0 and all(map(np.isfinite, with_padding))


def test_an_unknown_option_names_the_known_ones():
    known = "weights, present, valid_B, group_norm, batch_norm, eps, normalize_by_std, batch_eps, "
    with pytest.raises(TypeError) as raised:
        advantages(ROWS, batchnorm="none")
    message = "unknown option 'batchnorm'; did you mean 'batch_norm'? The options are "
    assert message + known in str(raised.value)
    with pytest.raises(TypeError, match=r"unknown option 'dialect'\. The options are weights, "):
        advantages(ROWS, dialect="trl")


def test_every_option_of_the_method_is_written_out():
    """With its default, so that an editor shows it and a type checker knows it."""
    parameters = inspect.signature(compute_gdpo_advantage).parameters
    defaults = {each.name: each.default for each in fields(Options)}
    assert defaults == {name: parameters[name].default for name in defaults}
    typed = [each for each in parameters.values() if each.annotation is not inspect.Parameter.empty]
    assert len(typed) == len(parameters)


def in_fresh_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_import_of_the_package_loads_no_torch():
    done = in_fresh_process("import sys, verl_gdpo; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    "line", ["from verl_gdpo import compute_gdpo_advantage", "verl_gdpo.compute_gdpo_advantage"]
)
def test_without_torch_a_sentence_says_what_to_install(line):
    # None in `sys.modules` makes Python raise what it raises for a package that is not there.
    done = in_fresh_process(f"import sys; sys.modules['torch'] = None; import verl_gdpo\n{line}")
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch("ImportError: .* needs torch, .* not installed: pip install torch", last)
