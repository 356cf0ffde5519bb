"""Which reward manager a run has, asked where the manager itself is not needed: in the trainer.

Relies on verl 0.9: `resolve_reward_manager_cls(config)`, which raises ValueError for a name that
nobody has registered, and the attribute `reward_manager` of reward workers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import ray
from verl.trainer.ppo.reward import resolve_reward_manager_cls

import verl_gdpo

OURS = "verl_gdpo.hooks.reward_manager"  # the module of our manager


def is_ours(manager_cls: type) -> bool:
    """Whether it is our manager, or a subclass of it."""
    return any(base.__module__ == OURS for base in manager_cls.__mro__)


def runs_gdpo_manager(config: Any) -> bool:
    """Return whether verl would make our manager, or a subclass of it, in its reward workers.

    The result is False for an unknown name: verl raises its own error when it makes the workers.
    """
    manager = config.reward.reward_manager
    if manager.source == "register":
        if manager.name == "gdpo":
            return True
        try:
            return is_ours(resolve_reward_manager_cls(config))
        except ValueError:
            return False
    return is_ours(resolve_reward_manager_cls(config))


def check_reward_workers(workers: Sequence[Any], sources: Iterable[str]) -> None:
    """Ask every reward worker which manager it runs, because a node may lack the package.

    Raises:
        RuntimeError: names the nodes whose reward workers do not run our manager, or cannot score
            rows of these data sources.
    """
    advice = (
        f"Install verl-gdpo=={verl_gdpo.__version__} on every node of the Ray cluster. If "
        "VERL_USE_EXTERNAL_PLUGINS is set there, it must include verl_gdpo"
    )
    try:
        asked = [worker.__ray_call__.remote(node_and_manager, {*sources}) for worker in workers]
        answers = ray.get(asked)
    except ray.exceptions.RayError as error:  # a node without the package cannot answer
        raise RuntimeError(f"a reward worker did not start or answer: {error}. {advice}") from error
    foreign = sorted({node for node, runs_ours, _ in answers if not runs_ours})
    if foreign:
        raise RuntimeError(
            f"reward.reward_manager: on nodes {foreign} the reward workers do not run the manager "
            f"of verl-gdpo. {advice}"
        )
    for node, _, refusal in answers:
        if refusal:
            raise RuntimeError(f"reward worker on node {node}: {refusal}")


def node_and_manager(worker: Any, sources: Iterable[str]) -> tuple[str, bool, str]:
    """Return the node's address, whether its manager is ours, and why it cannot score the sources.

    It runs in a reward worker.
    """
    manager, node = worker.reward_manager, ray.util.get_node_ip_address()
    if not is_ours(type(manager)):
        return node, False, ""
    return node, True, manager.cannot_score(sources)
