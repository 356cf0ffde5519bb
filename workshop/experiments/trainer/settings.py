"""What is compared: the settings, their arms and seeds, and the configuration of every run."""

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from workshop.experiments.trainer import policy, task
from workshop.experiments.trainer.task import Row, ranges_of

REPO = Path(__file__).parents[3]
OWN_RECIPES = Path(__file__).parent / "recipes"
# arm: recipe of the estimator, and whether each reward is divided by its range
ARMS = {
    "grpo": ("grpo", False),
    "gdpo": ("gdpo", False),
    "grpo_rescaled": ("grpo", True),
    "gdpo_no_batch_norm": ("gdpo_no_batch_norm", False),
    "grpo_batch_norm": ("grpo_batch_norm", False),
    "grpo_no_std": ("grpo_no_std", False),
}


@dataclass(frozen=True)
class Setting:
    """A task with its ranges.

    ranges: {reward: its range}, before the factor of a prompt.
    recipe: the NAME of `task=NAME`.
    own_format: see `task.make_rows`.
    """

    title: str
    arms: tuple[str, ...]
    seeds: Sequence[int]
    ranges: Mapping[str, float]
    recipe: str = "facts"
    own_format: bool = False


SETTINGS = {
    "20_to_1": Setting(
        "ranges 20 and 1",
        ("grpo", "gdpo", "grpo_rescaled"),
        range(1, 6),
        {"format": 20.0, "answer": 1.0},
    ),
    "1_to_1": Setting(
        "equal ranges", ("grpo", "gdpo"), range(1, 6), {"format": 1.0, "answer": 1.0}
    ),
    "by_prompt": Setting(
        "ranges by prompt",
        ("grpo", "gdpo", "grpo_rescaled"),
        range(1, 9),
        {"format": 1.0, "answer": 1.0},
        own_format=True,
    ),
    "tool_rl": Setting(
        "ToolRL's rewards",
        ("grpo", "gdpo", "grpo_rescaled"),
        range(1, 6),
        {"format": 1.0, "correctness": 6.0},
        recipe="tool_rl",
    ),
}
PROTOCOL = ("20_to_1", "1_to_1", "by_prompt", "tool_rl")  # the settings of protocol.md
FURTHER_ARMS = ("gdpo_no_batch_norm", "grpo_batch_norm", "grpo_no_std")  # of the first setting
# what every run has in common, on top of recipes/
SHARED = (
    "hardware=cpu",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.validation_data_dir=null",
    "trainer.logger=[file]",
)
# ToolRL's task of recipes/, shortened, and without the reference model
TOOL_RL = ("actor_rollout_ref.actor.use_kl_loss=false", "trainer.total_training_steps=30")


class Run(NamedTuple):
    """One training; `hardware` is a NAME of recipes/hardware/."""

    setting: str
    arm: str
    seed: int
    hardware: str = "cpu"

    def __str__(self) -> str:
        return f"{self.setting}-{self.arm}-{self.seed}"


def plan(hardware: str = "cpu") -> Iterator[Run]:
    """All runs in their order: the seeds outermost, so that arms can be compared early."""
    if hardware != "cpu":
        name = "tool_rl"  # with the model and the rows of the paper
        setting = SETTINGS[name]
        yield from (Run(name, a, s, hardware) for s in setting.seeds for a in setting.arms)
        return
    for name, setting in SETTINGS.items():
        yield from (Run(name, arm, seed) for seed in setting.seeds for arm in setting.arms)
    first = next(iter(SETTINGS))
    for seed in SETTINGS[first].seeds:
        yield from (Run(first, arm, seed) for arm in FURTHER_ARMS)


def overrides(run: Run) -> list[str]:
    """The keys of a run, but for its seed, its folders and its weights."""
    setting, (estimator, _) = SETTINGS[run.setting], ARMS[run.arm]
    if run.hardware != "cpu":
        # a checkpoint of 1.5 B parameters is 18 GB
        return [f"hardware={run.hardware}", f"estimator={estimator}", "trainer.save_freq=-1"]
    keys = [f"task={setting.recipe}", f"estimator={estimator}", *SHARED]
    if setting.recipe == "tool_rl":
        return [*keys, *TOOL_RL]
    ranges = ", ".join(f"{reward}: {size}" for reward, size in setting.ranges.items())
    return [*keys, f"+reward.custom_reward_function.reward_kwargs.ranges={{{ranges}}}"]


def weights(run: Run, rows: Sequence[Row]) -> list[str]:
    """The weights that divide each reward by its range, for the arm that has them.

    Where ranges depend on the prompt, it is the root of their mean square, as in a standard
    deviation over the batch.
    """
    setting, (_, is_rescaled) = SETTINGS[run.setting], ARMS[run.arm]
    if not is_rescaled:
        return []
    if setting.recipe == "tool_rl":
        sizes = dict(setting.ranges)
    else:
        of_rows = [ranges_of(row, setting.ranges) for row in rows]
        sizes = {
            reward: sqrt(sum(sizes[reward] ** 2 for sizes in of_rows) / len(of_rows))
            for reward in setting.ranges
        }
    return [f"++algorithm.gdpo.rewards.{reward}={1 / size}" for reward, size in sizes.items()]


# {what code imports today: from where it did when the runs were made}
LAY = {
    "'workshop.experiments.": "'experiments.",
    "'verl_gdpo.cpu.sampler', names=[alias(name='SamplingParams')": (
        "'verl_gdpo.cpu.sampling_params', names=[alias(name='SamplingParams')"
    ),
    "'workshop.tiny_policy.model'": "'verl_gdpo.cpu.tiny_model'",
}


# what the runs use of the modules of the task
USED = {
    task: {"make_rows", "compute_score", "demonstration", "ranges_of"},
    policy: {"make_policy", "start_rates"},
}


def _used(module: ast.Module, names: set[str]) -> ast.Module:
    """Keep what these names of a module reach, in its order."""
    defined = {name: node for node in module.body for name in _defines(node)}
    reached, left = set[str](), {*names}
    while left:
        reached |= left
        nodes = [defined[name] for name in left if name in defined]
        used = {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}
        left = used - reached
    kept: list[ast.stmt] = []
    for node in module.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [alias for alias in node.names if _name_of(alias) in reached]
            if node.names:
                kept.append(node)
        elif isinstance(node, ast.Expr) or reached.intersection(_defines(node)):
            kept.append(node)
    return ast.Module(kept, type_ignores=[])


def _name_of(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {
        part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
    }


def fingerprint(run: Run) -> str:
    """Of everything that a run's result depends on, but for its seed and the machine.

    Comments do not count, and neither does what the rows, the rewards and the policy do not use.
    """
    setting, (estimator, is_rescaled) = SETTINGS[run.setting], ARMS[run.arm]
    recipes = REPO / "recipes"
    files = [recipes / "train.yaml", recipes / f"hardware/{run.hardware}.yaml"]
    files += [recipes / f"estimator/{estimator}.yaml"]
    if setting.recipe == "tool_rl":
        files += [recipes / "task/tool_rl.yaml", recipes / "task_on_hardware/tool_rl-cpu.yaml"]
        code = []
    else:
        files += [OWN_RECIPES / "task/facts.yaml"]
        code = [
            ast.dump(_used(ast.parse(Path(str(module.__file__)).read_text()), names))
            for module, names in USED.items()
        ]
        for today, then in LAY.items():
            code = [text.replace(today, then) for text in code]
    parsed: list[Any] = [yaml.safe_load(file.read_text()) for file in files]
    parts = [parsed, code, overrides(run), is_rescaled, setting.own_format]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
