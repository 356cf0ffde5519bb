"""What is compared: the settings, their arms and seeds, and the configuration of every run."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import yaml

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
THREE = ("grpo", "gdpo", "grpo_rescaled")
Bounds = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Setting:
    """A task with its rewards.

    bounds: {reward: its lowest and its highest value}, before the factor of a prompt.
    recipe: the NAME of `task=NAME`.
    own_format: see `task.make_rows`.
    edition: 1 is closed, and its results have the shares "small" and "large".
    primary: the share that decides.
    when: {reward: another one, which has to be 1, or else the first is 0}.
    divisors: what rescaled GRPO divides by, if not by the ranges: the spreads in the pilot.
    keys: what this setting adds to the recipe.
    """

    title: str
    arms: tuple[str, ...]
    seeds: Sequence[int]
    bounds: Bounds
    recipe: str = "facts"
    own_format: bool = False
    edition: int = 1
    primary: str = "small"
    when: Mapping[str, str] = field(default_factory=dict)
    divisors: Mapping[str, float] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    steps: int = 30

    @property
    def ranges(self) -> dict[str, float]:
        return {reward: high - low for reward, (low, high) in self.bounds.items()}

    @property
    def columns(self) -> dict[str, str]:
        """{share of a result: what the rollout dumps call its reward}."""
        if self.recipe == "facts":
            return {"small": "small_met", "large": "large_met"}
        if self.edition == 1:
            by_range = sorted(self.ranges, key=self.ranges.__getitem__)
            return dict(zip(("small", "large"), by_range, strict=True))
        return {reward: reward for reward in self.bounds}

    @property
    def worth(self) -> dict[str, float]:
        """{share of a result: what all of it adds to the score}."""
        if "small" in self.columns:
            return dict(zip(("small", "large"), sorted(self.ranges.values()), strict=True))
        return self.ranges


FACTS = {"format": (0.0, 1.0), "answer": (0.0, 1.0)}
TOOL_RL = {"format": (0.0, 1.0), "correctness": (-3.0, 3.0)}
MATHS = {"correctness": (0.0, 1.0), "length": (0.0, 1.0)}
TWENTY = {**FACTS, "format": (0.0, 20.0)}
RATE = "actor_rollout_ref.actor.optim.lr=1e-3"  # of `facts`, for a policy of its size
NO_FILTER = (RATE, "algorithm.filter_groups.enable=false")
FIVE = range(1, 6)
SETTINGS = {
    "20_to_1": Setting("ranges 20 and 1", THREE, FIVE, TWENTY),
    "1_to_1": Setting("equal ranges", THREE[:2], FIVE, FACTS),
    "by_prompt": Setting("ranges by prompt", THREE, range(1, 9), FACTS, own_format=True),
    "tool_rl": Setting("ToolRL's rewards", THREE, FIVE, TOOL_RL, "tool_rl"),
    "gsm8k": Setting(
        "GSM8K's three",
        THREE,
        FIVE,
        dict.fromkeys(("format", "correctness", "integer"), (0.0, 1.0)),
        "gsm8k",
        edition=2,
        primary="correctness",
        divisors={"format": 0.506, "correctness": 0.368, "integer": 0.473},
        keys=(RATE,),
    ),
    "maths": Setting(
        "maths and length",
        THREE,
        FIVE,
        MATHS,
        "math_length",
        edition=2,
        primary="correctness",
        divisors={"correctness": 0.346, "length": 0.355},
        keys=NO_FILTER,
    ),
    "maths_if_correct": Setting(
        "length only if correct",
        THREE,
        FIVE,
        MATHS,
        "math_length",
        edition=2,
        primary="length",
        when={"length": "correctness"},
        divisors={"correctness": 0.441, "length": 0.163},
        keys=NO_FILTER,
    ),
    "tool_rl_seeds": Setting(
        "ToolRL's rewards, again", THREE, FIVE, TOOL_RL, "tool_rl", edition=2, primary="format"
    ),
    "coding": Setting(
        "coding's three",
        THREE[:2],
        range(1, 4),
        dict.fromkeys(("pass", "length", "bug"), (0.0, 1.0)),
        "coding",
        edition=2,
        primary="length",
        keys=NO_FILTER,
    ),
    "20_to_1_long": Setting(
        "ranges 20 and 1, 120 steps", THREE[:2], range(1, 3), TWENTY, edition=2, steps=120
    ),
}
PROTOCOL = ("20_to_1", "1_to_1", "by_prompt", "tool_rl")  # the settings of protocol.md
FURTHER_ARMS = ("gdpo_no_batch_norm", "grpo_batch_norm", "grpo_no_std")  # of the first setting
# of protocol_2.md: those of which something is claimed, and the others
SECOND = ("gsm8k", "maths", "maths_if_correct", "tool_rl_seeds")
EXPLORED = ("coding", "20_to_1_long")
PILOT_SEED = 100  # used for nothing else
# what every run has in common, on top of recipes/
SHARED = (
    "hardware=cpu",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.validation_data_dir=null",
    "trainer.logger=[file]",
)


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
    for name in PROTOCOL:
        yield from _runs_of(name)
    first = next(iter(SETTINGS))
    for seed in SETTINGS[first].seeds:
        yield from (Run(first, arm, seed) for arm in FURTHER_ARMS)
    yield from sorted((run for name in SECOND for run in _runs_of(name)), key=lambda run: run.seed)
    for name in SETTINGS:
        if name not in (*PROTOCOL, *SECOND):
            yield from _runs_of(name)


def pilot() -> list[Run]:
    """GRPO alone: whether each reward varies, before the second protocol was final."""
    return [Run(name, "grpo", PILOT_SEED) for name in (*SECOND, "coding")]


def _runs_of(name: str) -> Iterator[Run]:
    setting = SETTINGS[name]
    yield from (Run(name, arm, seed) for seed in setting.seeds for arm in setting.arms)


def overrides(run: Run) -> list[str]:
    """The keys of a run, but for its seed, its folders and its weights."""
    setting, (estimator, _) = SETTINGS[run.setting], ARMS[run.arm]
    if run.hardware != "cpu":
        # a checkpoint of 1.5 B parameters is 18 GB
        return [f"hardware={run.hardware}", f"estimator={estimator}", "trainer.save_freq=-1"]
    keys = [f"task={setting.recipe}", f"estimator={estimator}", *SHARED, *setting.keys]
    keys += [f"trainer.{key}={setting.steps}" for key in ("total_training_steps", "total_epochs")]
    if setting.recipe != "facts":
        # so there is no reference model
        return [*keys, "actor_rollout_ref.actor.use_kl_loss=false"]
    ranges = ", ".join(f"{reward}: {size}" for reward, size in setting.ranges.items())
    return [*keys, f"+reward.custom_reward_function.reward_kwargs.ranges={{{ranges}}}"]


def weights(run: Run, rows: Sequence[Row]) -> list[str]:
    """The weights that divide each reward by its range, for the arm that has them; the conditions.

    Where ranges depend on the prompt, it is the root of their mean square, as in a standard
    deviation over the batch.
    """
    setting, (_, is_rescaled) = SETTINGS[run.setting], ARMS[run.arm]
    sizes = dict.fromkeys(setting.bounds, 1.0)
    if is_rescaled and setting.own_format:
        of_rows = [ranges_of(row, setting.ranges) for row in rows]
        sizes = {r: sqrt(sum(of[r] ** 2 for of in of_rows) / len(of_rows)) for r in sizes}
    elif is_rescaled:
        sizes = {**setting.ranges, **setting.divisors}
    elif not setting.when:
        return []  # those of the recipe
    terms = {reward: str(1 / size) for reward, size in sizes.items()}
    for reward, other in setting.when.items():
        terms[reward] = f"{{weight: {terms[reward]}, when: {{reward: {other}, at_least: 1.0}}}}"
    return [f"++algorithm.gdpo.rewards.{reward}={term}" for reward, term in terms.items()]


def fingerprint(run: Run) -> str:
    """Of the recipes and keys of a run, but for its seed; comments do not count."""
    setting, (estimator, is_rescaled) = SETTINGS[run.setting], ARMS[run.arm]
    recipes, task = REPO / "recipes", setting.recipe
    files = [recipes / "train.yaml", recipes / f"hardware/{run.hardware}.yaml"]
    files += [recipes / f"estimator/{estimator}.yaml"]
    if task == "facts":
        files += [OWN_RECIPES / "task/facts.yaml"]
    else:
        files += [recipes / f"task/{task}.yaml"]
        files += [recipes / f"task_on_hardware/{task}-cpu.yaml"]
    parsed: list[Any] = [yaml.safe_load(file.read_text()) for file in files]
    divisors = setting.divisors if is_rescaled else {}
    scales = [is_rescaled, setting.own_format, setting.when, divisors]
    return hashlib.sha256(json.dumps([parsed, overrides(run), scales]).encode()).hexdigest()[:16]
