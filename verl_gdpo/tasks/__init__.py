"""What a task is, and the registry of tasks, which rewards, data and evaluation ask.

Ours are the folders here that have a `score.py`: its `TASK` is the record, and `DATA_SOURCES` of
the folder's `__init__.py` says which rows are its own. A scorer is imported when somebody asks for
its task, so that a run loads those that it needs. Tasks of other distributions are their entry
points in the group `verl_gdpo.tasks`; docs/adding_a_task.md makes one.
"""

import functools
import importlib
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

Rewards = Mapping[str, float | None]


def _nothing(*_args: Any, **_options: Any) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Evaluation:
    """How `verl-gdpo evaluate` scores the answers to the rows of a task.

    columns: {column of the table: function of the rewards}. With none, each reward is one.
    options: of the scorer, whatever a run has.
    max_tokens: the limit of an answer, unless a run or --max-tokens has another.
    """

    columns: Mapping[str, Callable[[Mapping[str, Any]], float]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 1024


@dataclass(frozen=True)
class Programs:
    """What the reward manager needs of a scorer that runs programs.

    at_once: `at_once()` returns how many programs this machine runs at a time.
    """

    at_once: Callable[[], int]


@dataclass(frozen=True)
class Task:
    """One task: its rows, its rewards and its answers.

    name: the NAME in `recipes/task/NAME.yaml` and `verl-gdpo data NAME`.
    data_sources: values of verl's column `data_source`; data preparation writes the first one.
    score: `score(response, ground_truth, *, response_tokens, step, **options)` returns
        {reward: value}. A bad response gets a low score, a bad ground truth raises ValueError. A
        value is None where the reward does not apply to the row.
    bounds: `bounds(**options)` returns {reward: (lowest, highest)}. The rewards of `score` stay
        within these bounds during a whole run with these options.
    reward_names: all rewards that `score` may return, under any options.
    scores: what `score` gets as `response`: "answer", what follows the thought, or "response", all
        that the policy wrote, as if it had written the opening tag that ends its prompt. Where the
        prompt has closed the thought, `score` is told so if it takes the keyword `closed_thought`:
        `format` then asks for all but the thought.
    kept_tokens: tags that stay in a response if the tokenizer has them as special tokens, besides
        those of a thought.
    good_response: `good_response(ground_truth)` returns a response with the highest rewards.
        `check` scores it and damaged copies of it.
    good_response_options: the options of `score` that `good_response` takes too, as keywords.
    system_prompt: the instructions that data preparation puts before each question. With None, each
        row has its own.
    verl_names: {name of a reward in verl's own scorer for these rows: our name}.
    missing: `missing(**options)` returns what this machine cannot give to `score`, for `check` to
        say. It raises OSError where the machine cannot score at all.
    programs: see `Programs`; None for a scorer that runs none.
    notes: `notes()` returns what the scorer fills in for the log, as its keyword `notes`. The
        `numbers()` of it are logged. With None, the scorer has no such keyword.
    main_reward: the reward that says whether an answer is right, which `evaluate` shows first.
    rows: the module whose `SOURCES` (`preparation/sources.py`) says where rows come from. Only data
        preparation imports it. Without one, they are files of questions and answers.
    evaluation: see `Evaluation`.
    origin: the distribution that has the task; the registry sets it.
    """

    name: str
    data_sources: tuple[str, ...]
    score: Callable[..., Rewards]
    bounds: Callable[..., Mapping[str, tuple[float, float]]]
    reward_names: tuple[str, ...]
    good_response: Callable[..., str]
    system_prompt: str | None
    verl_names: Mapping[str, str] = field(default_factory=dict)
    missing: Callable[..., Sequence[str]] = _nothing
    programs: Programs | None = None
    notes: Callable[[], Any] | None = None
    good_response_options: tuple[str, ...] = ()
    scores: Literal["response", "answer"] = "response"
    kept_tokens: tuple[str, ...] = ()
    main_reward: str = ""
    rows: str = ""
    evaluation: Evaluation = field(default_factory=Evaluation)
    origin: str = "verl-gdpo"

    def __post_init__(self) -> None:
        if self.scores not in ("response", "answer"):
            raise ValueError(f'scores={self.scores!r}: expected "response" or "answer"')

    def good_response_of(self, ground_truth: str, options: Mapping[str, Any]) -> str:
        """Return the good response of a run with these options of the scorer."""
        taken = self.good_response_options
        taken_options = {name: options[name] for name in taken if name in options}
        return self.good_response(ground_truth, **taken_options)

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Score an empty response, which raises ValueError if the ground truth is bad."""
        self.score("", ground_truth, response_tokens=0)


# The usual reward of verl's own scorers, which score the rows of all other data sources.
VERL_REWARD_NAMES = ("acc",)

# The keywords that the reward manager passes: `notes` where a task has notes, and `closed_thought`
# where its scorer takes it.
GIVEN_BY_MANAGER = ("response_tokens", "step", "notes", "closed_thought")
NAMED_ROWS = 10  # So many bad rows are named in a message.

GROUP = "verl_gdpo.tasks"  # The group of entry points.
FOLDERS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/score.py"))


class TaskError(ValueError):
    """A task cannot be used. The message names the distribution that has it."""


class Tasks(UserDict[str, Task]):
    """Tasks by a key. A task is imported when its key is asked for, ours before those of others."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        super().__init__()
        self.folders = folders  # {key: the folder here that has our task}

    def __missing__(self, key: str) -> Task:
        if key in self.folders:
            score = importlib.import_module(f"{__name__}.{self.folders[key]}.score")
            self.data[key] = score.TASK
        else:
            _add_others()
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        if key not in self.folders:
            _add_others()
        return key in self.folders or key in self.data

    def __iter__(self) -> Iterator[str]:
        _add_others()
        # A task of ours whose scorer is imported is in both.
        return iter(dict.fromkeys(self.folders) | dict.fromkeys(self.data))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _folder_by_source() -> dict[str, str]:
    """Return {data source: folder here} without importing a scorer."""
    folder_by_source = {}
    for folder in FOLDERS:
        for source in importlib.import_module(f"{__name__}.{folder}").DATA_SOURCES:
            folder_by_source[source] = folder
    return folder_by_source


TASKS = Tasks({folder: folder for folder in FOLDERS})  # {name: task}
TASK_BY_SOURCE = Tasks(_folder_by_source())  # {value of verl's column `data_source`: task}


@functools.cache
def _add_others() -> None:
    """Add the tasks of other distributions; after an error, the next call tries again."""
    for entry in entry_points(group=GROUP):
        assert entry.dist is not None
        origin = f"{entry.dist.name} {entry.dist.version}"
        try:
            task = replace(entry.load(), origin=origin)
        except Exception as error:
            raise TaskError(
                f"the entry point {entry.name} = {entry.value} in the group {GROUP} of {origin} "
                f"gives no Task: {type(error).__name__}: {error}. Mend or uninstall {origin}"
            ) from error
        _add("task", TASKS, task.name, task)
        for source in task.data_sources:
            _add("data_source", TASK_BY_SOURCE, source, task)


def _add(what: str, tasks: Tasks, key: str, task: Task) -> None:
    """Add a task; raise TaskError if another one has the key."""
    if key in tasks.folders:
        other = tasks[key]
    else:
        # A distribution that is found twice has equal tasks.
        other = tasks.data.setdefault(key, task)
    if other != task:
        raise TaskError(
            f"{what} {key!r} is in {other.origin} (task {other.name!r}) and in "
            f"{task.origin} (task {task.name!r}); rename one, or uninstall one"
        )


def belongs_elsewhere(name: str, data_source: str) -> bool:
    """Return whether rows of another task may have the reward `name`, which a row here lacks."""
    own = TASK_BY_SOURCE.get(data_source)
    of_others: set[str] = set()
    for task in TASK_BY_SOURCE.values():
        if task is not own:
            of_others.update(task.reward_names)
            of_others.update(task.verl_names)
    # verl's own scorers score the rows without a task of ours, and none of the others.
    if own is None:
        of_others.difference_update(VERL_REWARD_NAMES)
    else:
        of_others.update(VERL_REWARD_NAMES)
    return name in of_others


def declared_bounds(
    sources: Iterable[str], options: Mapping[str, Any]
) -> dict[str, tuple[float, float] | None]:
    """Return {reward: (lowest, highest)}, also under verl's names for the rewards.

    It is None where the data sources disagree.

    Args:
        sources: data sources. Sources without a scorer of ours declare no bounds.
        options: options of the scorers, from `reward.reward_kwargs`.

    Raises:
        ValueError: a scorer does not accept an option.
    """
    result: dict[str, tuple[float, float] | None] = {}
    for source in set(sources):
        if source not in TASK_BY_SOURCE:
            continue
        bounds = declared_by(source, options)
        verl_names = TASK_BY_SOURCE[source].verl_names
        of_verl = {verls: bounds[ours] for verls, ours in verl_names.items() if ours in bounds}
        for name, pair in (bounds | of_verl).items():
            if result.get(name, pair) == pair:
                result[name] = pair
            else:
                result[name] = None
    return result


def declared_by(source: str, options: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return {reward: (lowest, highest)} of the rewards that our scorer returns for a data source.

    It is empty if the scorer does not take its options, which `mistakes_of_options` names.
    """
    task = TASK_BY_SOURCE[source]
    own = options_for(source, options)
    try:
        inspect.signature(task.score).bind("", "", **own)
    except TypeError:
        return {}
    return dict(task.bounds(**own))


def mistakes_of_options(options: Mapping[str, Any], sources: Iterable[str]) -> list[str]:
    """Return a message for each option that none of our scorers takes.

    Args:
        options: `reward.reward_kwargs` of a run.
        sources: the data sources of the run's rows.
    """
    taken = {}
    for source in sources:
        if source in TASK_BY_SOURCE:
            taken[source] = options_of(TASK_BY_SOURCE[source])
    takes = "; ".join(f"rows of {source!r} take {names}" for source, names in taken.items())
    if not takes:
        takes = "verl scores them, without options"
    mistakes = []
    for name in options:
        if not any(name in names for names in taken.values()):
            mistakes.append(
                f"reward.reward_kwargs.{name}: no scorer of the training rows takes it "
                f"({takes}). Remove it; on the command line, ~reward.reward_kwargs.{name}"
            )
    return mistakes


def options_for(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that only the scorers of other data sources take."""
    unknown = options.keys() - options_of(TASK_BY_SOURCE[source])
    if not unknown:
        # Then no scorer of another task has to be loaded.
        return dict(options)
    of_any_task = set()
    for task in TASK_BY_SOURCE.values():
        of_any_task.update(options_of(task))
    foreign = unknown & of_any_task
    return {name: value for name, value in options.items() if name not in foreign}


def options_of(task: Task) -> list[str]:
    """Return the options of a task's scorer: its keywords that no manager passes."""
    options = []
    for parameter in inspect.signature(task.score).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in GIVEN_BY_MANAGER:
            options.append(parameter.name)
    return options


def check_ground_truths(rows: Iterable[Mapping[str, Any]], where: str) -> None:
    """Find a bad ground truth before training.

    Args:
        rows: rows with verl's columns `data_source` and `reward_model`. Rows of unknown sources are
            skipped.
        where: name of the rows in the message, such as "data.train_files".

    Raises:
        ValueError: a ground truth is bad; the message counts the bad rows, and names the first ten
            with their reasons.
    """
    bad = []
    for number, row in enumerate(rows):
        task = TASK_BY_SOURCE.get(row["data_source"])
        if task is None:
            continue
        ground_truth = (row["reward_model"] or {}).get("ground_truth")
        try:
            task.check_ground_truth(ground_truth)
        except (TypeError, ValueError) as error:
            bad.append(f"row {number} (data_source {row['data_source']!r}): {error}")
    if bad:
        raise ValueError(bad_rows(where, bad))


def bad_rows(where: str, reasons: Sequence[str]) -> str:
    """One line for one bad row, and one more for each of the first ten of several; "" for none."""
    if not reasons:
        return ""
    # A reason may have several lines.
    named = [" ".join(reason.split()) for reason in reasons[:NAMED_ROWS]]
    if len(reasons) == 1:
        return f"{where}, {named[0]}"
    header = f"{where} has {len(reasons):,} bad rows"
    if len(reasons) > NAMED_ROWS:
        header += f", of which the first {NAMED_ROWS} are"
    return "\n  ".join([f"{header}:", *named])
