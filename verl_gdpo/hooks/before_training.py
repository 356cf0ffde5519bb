"""What is asked before the first step: what scores a run's rows, and whether all nodes agree.

Relies on verl 0.9: `resolve_reward_manager_cls(config)`, which raises ValueError for a name that
nobody has registered, the attribute `reward_manager` of reward workers, and
`RLHFDataset.dataframe`, a table of Hugging Face's `datasets`; `run_ppo` makes the trainer's process
by `task_runner_class.remote()`, or by its `options`, once Ray runs. Relies on Ray 2: `ray.nodes`,
`NodeAffinitySchedulingStrategy`, and `max_calls`, after which the process of a task ends.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.trainer.ppo.reward import resolve_reward_manager_cls

import verl_gdpo

# The module of our manager.
OURS = "verl_gdpo.hooks.reward_manager"
# What scores and what trains has to be the same on all nodes: paths in this package. Tools, charts
# and pages may differ.
COMPARED = ("__init__.py", "plugin.py", "algorithm", "scoring", "hooks", "tasks")
# {part: a module of it}. A run uses the part if this process has loaded the module.
COMPARED_IF_LOADED = {
    "cpu": "verl_gdpo.cpu.device",
    "tools/run/attention.py": "verl_gdpo.tools.run.attention",
    "tools/run/checkpoint_loading.py": "verl_gdpo.tools.run.checkpoint_loading",
}
# Data is prepared before a run starts, so nodes may differ in how.
DATA_PREPARATION = ("tasks/preparation/*", "tasks/*/rows.py")
# For its answer a node imports verl, which takes minutes from a slow shared disk.
ANSWER_SECONDS = 300.0


def is_ours(manager_cls: type) -> bool:
    """Whether it is our manager, or a subclass of it."""
    # The module goes by its name, because importing it would load all that scores.
    return any(base.__module__ == OURS for base in manager_cls.__mro__)


def runs_gdpo_manager(config: Any) -> bool:
    """Return whether verl would make our manager, or a subclass of it, in its reward workers.

    The result is False for an unknown name: verl raises its own error when it makes the workers.
    """
    manager = config.reward.reward_manager
    # The usual case needs no import of a manager.
    if manager.source == "register" and manager.name == "gdpo":
        return True
    try:
        manager_cls = resolve_reward_manager_cls(config)
    except ValueError:
        # Of a name that nobody has registered, verl says so itself. A file that cannot be loaded
        # is another error.
        if manager.source != "register":
            raise
        return False
    return is_ours(manager_cls)


def may_have_gdpo_manager(config: Any) -> bool:
    """Return False if a manager's file does not name this package, so that it is not ours.

    verl runs that file in its reward workers alone. Other processes ask this before they run it.
    """
    source = OmegaConf.select(config, "reward.reward_manager.source")
    path = str(OmegaConf.select(config, "reward.reward_manager.module.path"))
    if source != "importlib" or path.startswith("pkg://"):
        return True
    try:
        # verl takes a path with this prefix too.
        text = Path(path.removeprefix("file://")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        # verl says so where it loads the file.
        return False
    return "verl_gdpo" in text


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
    names = set(sources)
    try:
        # All workers answer side by side: for its answer, each imports the scorers of the rows.
        asked = [worker.__ray_call__.remote(node_and_manager, names) for worker in workers]
        answers = ray.get(asked)
    except ray.exceptions.RayError as error:
        # A node without the package cannot answer.
        raise RuntimeError(f"a reward worker did not start or answer: {error}. {advice}") from error
    foreign = {node for node, runs_ours, _ in answers if not runs_ours}
    if foreign:
        raise RuntimeError(
            f"reward.reward_manager: on nodes {sorted(foreign)} the reward workers do not run the "
            f"manager of verl-gdpo. {advice}"
        )
    # The first reason is enough, as nodes of a cluster mostly lack the same.
    for node, _, refusal in answers:
        if refusal:
            raise RuntimeError(f"reward worker on node {node}: {refusal}")


def node_and_manager(worker: Any, sources: Iterable[str]) -> tuple[str, bool, str]:
    """Return the node's address, whether its manager is ours, and why it cannot score the sources.

    It runs in a reward worker.
    """
    manager = worker.reward_manager
    node = ray.util.get_node_ip_address()
    # Another manager cannot be asked, and scores what it likes.
    if not is_ours(type(manager)):
        return node, False, ""
    return node, True, manager.cannot_score(sources)


def training_sources(config: Any) -> set[str] | None:
    """Return the values of `data_source` in `data.train_files`; see `sources_in`."""
    return sources_in(config, "train_files")


def sources_in(config: Any, key: str) -> set[str] | None:
    """Return the values of `data_source` in the files of `data.KEY`; None if only verl can tell.

    That is so for a dataset class of the user, an address such as `hdfs://`, and a file that cannot
    be read, of which verl says why.
    """
    files = OmegaConf.select(config, f"data.{key}")
    if not files or OmegaConf.select(config, "data.custom_cls.path"):
        return None
    if isinstance(files, str):
        files = [files]
    sources: set[Any] = set()
    for file in files:
        path = Path(str(file)).expanduser()
        try:
            sources.update(_sources_of_file(path))
        except (OSError, KeyError, pa.ArrowException):
            return None
    # verl says which row has none.
    if None in sources:
        return None
    return sources


def _sources_of_file(path: Path) -> list[Any]:
    """Return the values of `data_source` in a file of rows, without reading its texts into memory.

    Raises:
        OSError, KeyError, pyarrow.ArrowException: it cannot be read, or has no such column.
    """
    if path.suffix == ".parquet":
        table = pa.parquet.read_table(path, columns=["data_source"])
    else:
        # A JSON file has no columns to choose from, so all other fields are ignored.
        schema = pa.schema([("data_source", pa.string())])
        options = pa.json.ParseOptions(schema, unexpected_field_behavior="ignore")
        table = pa.json.read_json(path, parse_options=options)
    return list(table["data_source"].unique().to_pylist())


def scored_rows(dataset: Any) -> Any | None:
    """Return the columns that say how rows are scored; None for a dataset without such a table."""
    table: Any = getattr(dataset, "dataframe", None)
    columns = ["data_source", "reward_model"]
    if not set(columns).issubset(getattr(table, "column_names", ())):
        return None
    return table.select_columns(columns)


def compared_parts() -> list[str]:
    """Return the parts of this package that the run of this process uses, as `state` takes them."""
    parts = list(COMPARED)
    for part, module in COMPARED_IF_LOADED.items():
        if module in sys.modules:
            parts.append(part)
    return parts


def state(parts: Sequence[str]) -> str:
    """Return a hash of the code in some parts of this package.

    Args:
        parts: files and folders, relative to the package.

    Raises:
        RuntimeError: verl, which this module imports, has not loaded the plugin.
    """
    # The files may be there without effect: the environment says which plugins verl loads.
    if "verl_gdpo.plugin" not in sys.modules:
        raise RuntimeError("VERL_USE_EXTERNAL_PLUGINS does not include verl_gdpo there")
    root = Path(verl_gdpo.__path__[0])
    code = hashlib.sha256()
    for file in code_files(root, parts):
        code.update(f"{file}\n".encode() + (root / file).read_bytes())
    return code.hexdigest()[:12]


def code_files(root: Path, parts: Sequence[str]) -> list[Path]:
    """Return the Python files of these parts, relative to the package."""
    files: list[Path] = []
    for part in parts:
        path = root / part
        if path.is_dir():
            files.extend(path.rglob("*.py"))
        else:
            files.append(path)
    compared = []
    # Folders list their files in any order, and the hash needs one.
    for file in sorted(files):
        relative = file.relative_to(root)
        if not any(relative.match(pattern) for pattern in DATA_PREPARATION):
            compared.append(relative)
    return compared


def refuse_other_states() -> None:
    """Compare the package on all nodes with that of this process; one node alone is not asked.

    Raises:
        RuntimeError: names the nodes whose code scores or trains in another way, or that cannot
            answer.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # There is nobody who could differ, and an answer takes the start of a process.
    if len(nodes) < 2:
        return
    parts = compared_parts()
    ours = state(parts)
    # All nodes are asked before any is waited for, because each may take minutes.
    questions = [_asked(node["NodeID"], state, parts) for node in nodes]
    ray.wait(questions, num_returns=len(nodes), timeout=ANSWER_SECONDS)
    wrong = []
    # Two nodes may have one address, as where `ray start` was called twice on a machine.
    for node, question in zip(nodes, questions, strict=True):
        answer = _answer(question)
        if answer != ours:
            wrong.append(f"{node['NodeManagerAddress']}: {answer}")
    wrong.sort()
    if wrong:
        raise RuntimeError(
            "verl-gdpo is not the same on all nodes of the Ray cluster: its files that score and "
            f"train ({', '.join(parts)}) are {ours} here. {'; '.join(wrong)}. Install one state of "
            f"verl-gdpo {verl_gdpo.__version__} on every node"
        )


def _asked(node_id: str, function: Callable[..., str], *args: Any) -> Any:
    """Call a function on a node, in a process that ends after it."""
    # Without `soft`, Ray reports an error where the node has gone, and asks no other one.
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # By then the run may have taken all CPUs of the node, and the answer needs none for long.
    options = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=there)
    return options(function).remote(*args)


def _answer(question: Any) -> str:
    """Return the state that a node has told, or why it has not."""
    try:
        return str(ray.get(question, timeout=0))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(question, force=True)
        return f"no answer within {ANSWER_SECONDS:.0f} s"
    except ray.exceptions.RayError as error:
        # The last line of a remote traceback has the message.
        return str(error).strip().splitlines()[-1]


def probing(task_runner_class: Any) -> Any:
    """Return a stand-in for a class of Ray, which first calls `refuse_other_states`."""

    def method(name: str) -> Callable[..., Any]:
        def probe_and_call(*args: Any, **kwargs: Any) -> Any:
            refuse_other_states()
            return getattr(task_runner_class, name)(*args, **kwargs)

        return probe_and_call

    # verl calls one of the two on the class, once Ray runs.
    return SimpleNamespace(remote=method("remote"), options=method("options"))
