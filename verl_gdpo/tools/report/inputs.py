"""What was found of each run, what that makes possible, and how to have the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_gdpo.run.dump_reader import DUMPS_READ, dump_files, has_rewards
from verl_gdpo.run.folder import SCORE, training_rewards
from verl_gdpo.run.scorer import HOW
from verl_gdpo.tools.report.runs import Run, RunsOfArm
from verl_gdpo.tools.report.sections import Table

MANAGER = "train with reward.reward_manager.name=gdpo, which works with grpo too"
CONFIG = "name it with --config; Hydra writes outputs/DATE/TIME/.hydra/config.yaml"
DUMPS = "train with trainer.rollout_data_dir=FOLDER, and name the folder with --rollouts"


@dataclass(frozen=True)
class Input:
    """One thing that a report is made of."""

    name: str
    found: str
    gives: str
    need: str = ""  # how to have it; "" where it is there

    @property
    def use(self) -> str:
        return f"no {self.gives}: {self.need}" if self.need else self.gives

    def __str__(self) -> str:
        return f"{self.name}: {self.found} -> {self.use}"


def inputs(arms: Sequence[RunsOfArm]) -> Table:
    """The inputs of every run, as a table."""
    runs = [run for arm in arms for run in arm.runs]
    rows = [[run.name, one.name, one.found, one.use] for run in runs for one in inputs_of(run)]
    header = ["run", "input", "found", "what it makes possible, or how to have it"]
    if len(runs) == 1:
        rows, header = [row[1:] for row in rows], header[1:]
    return Table("What this report is made of", header, rows, labels=len(header), wraps=True)


def inputs_of(run: Run) -> list[Input]:
    """What was found of a run, and what was not."""
    rewards, config = named_rewards(run), run.config is not None
    return [
        Input(
            "metrics",
            f"{len(run.metrics)} steps, from {run.tracker}",
            "curves, response length, validation",
        ),
        Input(
            "rewards by name",
            ", ".join(rewards) or "their sum alone",
            "curve of each reward, influence, collapse, and most findings",
            "" if rewards else MANAGER,
        ),
        Input(
            "configuration",
            "yes" if config else "no",
            "model, data, seeds, and weights of the rewards",
            "" if config else CONFIG,
        ),
        *_of_rollouts(run),
    ]


def named_rewards(run: Run) -> list[str]:
    """The rewards in the metrics of training, which only verl-gdpo logs one by one."""
    return [name for name in training_rewards(run.metrics) if name != SCORE]


def _of_rollouts(run: Run) -> list[Input]:
    try:
        files = dump_files(run.rollouts)[0] if run.rollouts else []
    except ValueError:
        files = []
    if not files:
        named = run.setting("trainer.rollout_data_dir")
        found = f"no, {named} of the configuration is not here" if named else "no"
        return [Input("rollouts", found, "examples, and no replay", DUMPS)]
    read = f", {DUMPS_READ} of which are read" if len(files) > DUMPS_READ else ""
    dumps = Input("rollouts", f"{len(files)} steps in {run.rollouts}{read}", "examples, and replay")
    if has_rewards(files[-1]):
        return [dumps]
    scored, need = "alone", f"--scorer scores them again; {HOW}"
    if run.scorer is not None:
        scored, need = f"scored again by {run.scorer.name}", ""
    return [dumps, Input("rewards of each rollout", f"their sum, {scored}", "examples", need)]
