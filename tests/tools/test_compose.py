"""Overrides on a saved configuration mean what they mean to Hydra."""

import re
import shlex
from argparse import Namespace

import pytest
from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import line_of, read_settings
from verl_gdpo.tools.compose import PLAIN, compose_accepted, composed


@pytest.mark.parametrize(
    "before", [{}, {"gdpo": None}, {"gdpo": {"rewards": {"a": {"weight": 9}}}}]
)
def test_the_printed_line_sets_the_mapping_whatever_was_there(before):
    said = {"a": {"weight": {0: 1.0, 9: 0.5}, "bounds": [0, 1]}, "b (c), =d": -0.5, "d": None}
    line = line_of("algorithm.gdpo.rewards", said)
    config = composed(OmegaConf.create({"algorithm": before}), shlex.split(line))
    assert OmegaConf.to_container(config)["algorithm"]["gdpo"]["rewards"] == said
    assert [*read_settings(config.algorithm).rewards] == ["a", "b (c), =d"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.gdpo.eps=1", "'algorithm.gdpo.eps'. To append to your config use ++"),
        ("+algorithm.n=1", "Could not append to config. An item is already at 'algorithm.n'"),
        ("++algorithm.n=1,2", "expected one value"),
        ("++algorithm.n={", "++algorithm.n={"),
        ("++algorithm.n=${nowhere}", "nowhere"),
    ],
)
def test_what_hydra_refuses_is_refused(override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        composed(OmegaConf.create({"algorithm": {"n": 3}}), [override])


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["data.train_batch_size=6", "+data.train_batch_size=32"], "+data.train_batch_size=32"),
        (["+data.train_batch_size=32", "data.train_batch_size=32"], "+data.train_batch_size=32"),
        (["+data.mine=null", "~data.mine"], "~data.mine"),
        (["data.mine=1", "+data.mine=1"], "data.mine=1"),
    ],
)
def test_of_overrides_of_one_key_the_one_that_hydra_refuses_is_left_out(overrides, refused):
    options = Namespace(config_dir=None, config_name=PLAIN, config_path=None, overrides=overrides)
    _, left_out = compose_accepted(options)
    assert list(left_out) == [refused]


def test_composing_leaves_the_saved_configuration_as_it_is():
    saved = OmegaConf.create({"algorithm": {"n": 3, "twice": "${algorithm.n}"}})
    assert composed(saved, ["algorithm.n=5"]).algorithm == {"n": 5, "twice": 5}
    assert composed(saved, ["~algorithm.n", "++algorithm.twice=1"]).algorithm == {"twice": 1}
    assert saved.algorithm.n == 3
