"""A node of a Ray cluster is asked. tests/slow/nodes.py asks several of them."""

import os
import time

import pytest
import ray

from verl_gdpo.hooks import before_training


def answer_of(function, *args):
    (here,) = ray.nodes()
    question = before_training._asked(here["NodeID"], function, *args)
    ray.wait([question], timeout=60)
    return before_training._answer(question)


def test_a_node_answers_in_a_process_of_its_own(ray_session):
    def process():
        return os.getpid()

    assert len({answer_of(process), answer_of(process), str(os.getpid())}) == 3


def test_an_error_and_a_silent_node_are_answers(ray_session, monkeypatch):
    def fail():
        raise ValueError("of the node")

    def hang():
        time.sleep(600)

    assert answer_of(fail) == "ValueError: of the node"
    monkeypatch.setattr(ray, "wait", lambda *_, **__: None)
    assert answer_of(hang) == "no answer within 300 s"


@pytest.mark.slow
def test_a_node_tells_the_state_of_its_package(ray_session):
    parts = before_training.compared_parts()
    assert answer_of(before_training.state, parts) == before_training.state(parts)
