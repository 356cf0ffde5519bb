"""Files and folders that a run reads or makes: checkpoints, dumps, tools, agent loops, adapters."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.settings import hint
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import ACTOR, MODEL, ROLLOUT, Roles
from verl_gdpo.tools.check.output import message_of

MADE_FOLDERS = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
)
TOOL_AGENT = "tool_agent"
SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")
# what `load_class_from_fqn` gets, once the models are loaded
CLASSES = (
    f"{ROLLOUT}.agent.agent_loop_manager_class",
    f"{ROLLOUT}.checkpoint_manager_class",
)
SETTINGS_FILES = (
    f"{ROLLOUT}.router_config_path",  # verl.workers.rollout.router._load_router_yaml
    f"{ROLLOUT}.quantization_config_file",
    f"{ACTOR}.fsdp_config.qat.quantization_config_path",
    f"{ACTOR}.megatron.qat.quantization_config_path",
)


def look_at_folders(config: Any, answers: Answers) -> None:
    """Say which folders of a run cannot be made. None is made here."""
    for key in MADE_FOLDERS:
        folder = OmegaConf.select(config, key)
        is_for_checkpoints = key == "trainer.default_local_dir"
        if is_for_checkpoints and config.trainer.save_freq <= 0:
            continue
        if is_for_checkpoints and folder is None:
            answers.problems.append(
                f"{key}={folder} with trainer.save_freq={config.trainer.save_freq}: a checkpoint "
                "needs a folder"
            )
        if not folder:
            continue
        if not isinstance(folder, str):
            # os.makedirs takes texts, and verl calls it in the first step that writes
            answers.problems.append(
                f"{key}={folder}: expected the name of a folder, and verl would end at the first "
                "step that writes into it"
            )
            continue
        if "://" in folder:
            answers.warnings.append(
                f"{key}={folder}: verl writes into folders of the machine alone, and would make "
                f"one of the name {folder.partition('/')[0]} in the current folder"
            )
            continue
        _look_at_folder(f"{key}={folder}", Path(folder).expanduser().absolute(), answers)


def _look_at_folder(key: str, folder: Path, answers: Answers) -> None:
    """Say why a folder cannot be made or written, if it cannot."""
    remedy = "Name a folder that can be made"
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    # Who may write there is another matter on another machine.
    is_closed = not answers.is_elsewhere and not os.access(nearest, os.W_OK | os.X_OK)
    if not nearest.is_dir():
        answers.problems.append(f"{key}: {nearest} is no folder. {remedy}")
    elif is_closed or not _takes_files(nearest):
        answers.problems.append(f"{key}: nothing can be written in {nearest}. {remedy}")


def _takes_files(folder: Path) -> bool:
    """Whether the file system of a folder takes files: those of the kernel do not, even of root."""
    kernels = [Path("/proc"), Path("/sys")]
    return not any(folder == kernel or kernel in folder.parents for kernel in kernels)


def look_at_resume(config: Any, roles: Roles, answers: Answers) -> None:
    """Say whether the checkpoint of `trainer.resume_mode=resume_path` can be loaded.

    verl.trainer.ppo.v1.trainer_base.PPOTrainer._load_checkpoint looks for it once all models are
    loaded.
    """
    trainer = config.trainer
    if trainer.resume_mode == "auto":
        _look_at_newest(config, roles, answers)
    if trainer.resume_mode != "resume_path":
        _look_at_unread_path(trainer, answers)
        return
    path = trainer.resume_from_path
    key = f"trainer.resume_from_path={path}"
    expected = "expected the folder of a checkpoint, DEFAULT_LOCAL_DIR/global_step_NUMBER"
    if not isinstance(path, str):
        answers.problems.append(f"{key} with trainer.resume_mode=resume_path: {expected}")
        return
    step = path.split("global_step_")[-1]
    if "global_step_" not in path or not step.strip("/").isdigit():
        answers.problems.append(f"{key}: no global_step_NUMBER is at its end; {expected}")
        return
    if step.endswith("/"):
        answers.problems.append(
            f"{key}: verl reads the step's number from the end of the path. Leave the last / out"
        )
        return
    if "://" in path:
        return
    for name, role in (("actor", roles.actor), ("critic", roles.critic)):
        folder = Path(path).absolute() / name
        if role is None:
            continue
        if folder.is_dir():
            _look_at_shards(key, folder, role, config, answers)
        elif Path(path).is_dir():
            answers.problems.append(f"{key}: no folder '{name}' is in it; {expected}")
        else:
            answers.lack(path, f"{key}: there is no such folder; {expected}")
            return


def _look_at_unread_path(trainer: Any, answers: Answers) -> None:
    """Say what a run does instead of going on from a checkpoint that is named to it.

    A path that verl finds of itself is no mistake.
    """
    path = trainer.resume_from_path
    if not path or trainer.resume_mode not in ("auto", "disable"):
        return
    instead = "starts from scratch"
    folder = trainer.default_local_dir
    if trainer.resume_mode == "auto" and folder:
        newest = _newest_checkpoint(trainer)
        found = [Path(str(place)).absolute() for place in (folder, newest) if place]
        if Path(str(path)).absolute() in found:
            return
        instead = f"starts from scratch where trainer.default_local_dir={folder} has no checkpoint"
        if newest:
            instead = f"goes on from {newest}"
    answers.warnings.append(
        f"trainer.resume_from_path={path} with trainer.resume_mode={trainer.resume_mode}: verl "
        f"does not read this path, and the run {instead}. Set trainer.resume_mode=resume_path, or "
        "leave the path out"
    )


def _newest_checkpoint(trainer: Any) -> str | None:
    """Return the folder from which `trainer.resume_mode=auto` goes on; None if there is none."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    folder = trainer.default_local_dir
    if not folder:
        return None
    newest: str | None = _quietly(find_latest_ckpt_path, os.path.abspath(str(folder)))
    return newest


def _look_at_newest(config: Any, roles: Roles, answers: Answers) -> None:
    """Look at the checkpoint from which `trainer.resume_mode=auto` goes on, if there is one."""
    folder = config.trainer.default_local_dir
    newest = _newest_checkpoint(config.trainer)
    if newest is None:
        return
    for name, role in (("actor", roles.actor), ("critic", roles.critic)):
        shards = Path(newest) / name
        if role is not None and shards.is_dir():
            key = f"trainer.resume_mode=auto with trainer.default_local_dir={folder}"
            _look_at_shards(key, shards, role, config, answers)


def _look_at_shards(key: str, folder: Path, role: Any, config: Any, answers: Answers) -> None:
    """Compare a checkpoint's shards with the GPUs of the run.

    verl.utils.checkpoint.fsdp_checkpoint_manager.FSDPCheckpointManager.load_checkpoint opens
    model_world_size_GPUS_rank_RANK.pt in each process.
    """
    if "FSDP" not in type(role.engine).__name__ or "model" not in role.checkpoint.load_contents:
        return
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    found = [SHARD.fullmatch(file.name) for file in folder.iterdir()]
    sizes = {int(match[1]) for match in found if match is not None}
    if sizes and gpus not in sizes:
        saved = ", ".join(str(size) for size in sorted(sizes))
        answers.problems.append(
            f"{key}: the run has {gpus} GPUs, and {folder.name} was saved by {saved}. verl looks "
            f"for model_world_size_{gpus}_rank_0.pt there. Take as many GPUs, or merge the "
            f"checkpoint with `python -m verl.model_merger merge` and set {MODEL}.path to the "
            "result"
        )


def look_at_code(config: Any, answers: Answers) -> None:
    """Import the classes that a run takes from files and packages of the user's."""
    from verl.utils.dataset.rl_dataset import get_dataset_class
    from verl.utils.import_utils import import_external_libs, load_class_from_fqn

    path = OmegaConf.select(config, "data.custom_cls.path")
    if path and _is_file_here("data.custom_cls.path", str(path), answers):
        key = f"data.custom_cls.path={path}"
        answers.ask(key, _of_user, get_dataset_class, config.data)
    for name in CLASSES:
        full_name = OmegaConf.select(config, name)
        if full_name:
            answers.ask(f"{name}={full_name}", _of_user, load_class_from_fqn, full_name)
    module = OmegaConf.select(config, f"{ROLLOUT}.checkpoint_engine.custom_backend_module")
    if module:
        key = f"{ROLLOUT}.checkpoint_engine.custom_backend_module={module}"
        answers.ask(key, import_external_libs, module)


def _of_user(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return a result of the user's code, which may raise anything; it is a refusal."""
    try:
        return _quietly(function, argument)
    except Exception as error:
        raise ValueError(message_of(error)) from error


def _quietly(function: Callable[[Any], Any], argument: Any) -> Any:
    with redirect_stdout(StringIO()):
        return function(argument)


def _is_file_here(key: str, path: str, answers: Answers) -> bool:
    """Whether a file of code is here, a package, or a name in another notation of verl's."""
    name = path.removeprefix("file://")
    if "://" in name or Path(name).exists():
        return True
    answers.lack(name, f"{key}={path}: there is no such file")
    return False


def look_at_settings_files(config: Any, answers: Answers) -> None:
    """Say which files of settings, which verl opens once the models are loaded, are not here."""
    for key in SETTINGS_FILES:
        path = OmegaConf.select(config, key)
        if path:
            _find(key, str(path), answers)


def _find(key: str, path: str, answers: Answers) -> str | None:
    """Return a path as verl finds it; None if there is no such file, which is said."""
    # Of all versions of verl 0.9, this module has it.
    from verl.experimental.agent_loop.agent_loop import resolve_config_path

    try:
        found = str(resolve_config_path(path))
    except FileNotFoundError:
        found = path
    if Path(found).is_file():
        return found
    answers.lack(path, f"{key}={path}: there is no such file")
    return None


def look_at_agent_loops(config: Any, answers: Answers) -> None:
    """Read what `AgentLoopWorker.__init__` reads: tools, loops, and the parser of calls."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    agent = config.actor_rollout_ref.rollout.agent
    path = agent.get("agent_loop_config_path")
    known = set(map(str, _agent_loop_registry))
    if path:
        key = f"{ROLLOUT}.agent.agent_loop_config_path"
        file = _find(key, str(path), answers)
        of_file = file and answers.ask(f"{key}={path}", _loops_of_file, file)
        if of_file and agent.default_agent_loop not in {*known, *of_file}:
            answers.problems.append(
                f"{ROLLOUT}.agent.default_agent_loop={agent.default_agent_loop}: unknown to verl, "
                f"and not in {path}, which has {of_file}"
            )
    if agent.default_agent_loop == TOOL_AGENT:
        _look_at_parser(config, answers)
    turns = config.actor_rollout_ref.rollout.multi_turn
    key = f"{ROLLOUT}.multi_turn.tool_config_path"
    if turns.get("tool_config_path"):
        file = _find(key, str(turns.tool_config_path), answers)
        if file is not None:
            tools = answers.ask(f"{key}={turns.tool_config_path}", _import_tools, file)
            _warn_of_none(f"{key}={turns.tool_config_path}", tools, answers)
    key = f"{ROLLOUT}.multi_turn.function_tool_path"
    if turns.get("function_tool_path"):
        file = _find(key, str(turns.function_tool_path), answers)
        if file is not None:
            from verl.tools.function_tool import load_function_tools_from_path

            key = f"{key}={turns.function_tool_path}"
            tools = answers.ask(key, _of_user, load_function_tools_from_path, file)
            _warn_of_none(key, tools, answers)


def known_loops(config: Any) -> set[str] | None:
    """Return the names that a row may have in the column `agent_name`.

    None if code that nobody reads here may register more, or a file of loops cannot be read.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry, resolve_config_path

    agent = config.actor_rollout_ref.rollout.agent
    # Code of the user's that runs in verl's workers.
    if config.actor_rollout_ref.model.get("external_lib") or agent.get("agent_loop_manager_class"):
        return None
    known = set(map(str, _agent_loop_registry))
    path = agent.get("agent_loop_config_path")
    if not path:
        return known
    try:
        loops: Any = OmegaConf.load(resolve_config_path(str(path)))
        return known | {str(loop.name) for loop in loops}
    except Exception:
        # `look_at_agent_loops` says why.
        return None


def _warn_of_none(key: str, tools: Sequence[Any] | None, answers: Answers) -> None:
    if tools is not None and len(tools) == 0:
        answers.warnings.append(f"{key}: there is no tool in the file, so none can be called")


def _look_at_parser(config: Any, answers: Answers) -> None:
    """ToolAgentLoop asks for the parser when the first row is generated."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    name = config.actor_rollout_ref.rollout.multi_turn.format
    known = sorted(map(str, ToolParser._registry))
    if name not in known:
        answers.problems.append(
            f"{ROLLOUT}.multi_turn.format={name}: verl has no such parser of calls"
            f"{hint(str(name), known) or '; expected one of ' + ', '.join(known)}"
        )


def _loops_of_file(path: str) -> list[str]:
    """Return the names of the loops in a file, whose classes are imported and not made."""
    from hydra.utils import get_object

    names = []
    loops: Any = OmegaConf.load(path)
    for loop in loops:
        if not loop.get("name"):
            raise ValueError(f"the loop of {loop.get('_target_')} has no name")
        try:
            get_object(loop._target_)
        except Exception as error:
            raise ImportError(f"loop {loop.name}: {error}") from error
        names.append(str(loop.name))
    return names


def _import_tools(path: str) -> list[type]:
    """Import the classes of the tools in a file, and read their schemas.

    None is made: some of verl's own start Ray.
    """
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.tools.tool_registry import ToolType, get_tool_class

    tools: Any = OmegaConf.load(path)
    classes = []
    for tool in tools.tools:
        module = str(tool.class_name).rpartition(".")[0]
        try:
            ToolType(tool.config.type)
            if find_spec(module) is None:
                raise ModuleNotFoundError(f"there is no module {module}", name=module)
            classes.append(get_tool_class(tool.class_name))
            if tool.get("tool_schema") is not None:
                schema = OmegaConf.to_container(tool.tool_schema, resolve=True)
                OpenAIFunctionToolSchema.model_validate(schema)
        except Exception as error:
            raise ValueError(f"class_name {tool.class_name}: {error}") from error
    return classes


def look_at_adapter_files(config: Any, answers: Answers) -> None:
    """Say whether an adapter to go on with is there."""
    path = config.actor_rollout_ref.model.get("lora_adapter_path")
    if not path or "://" in str(path):
        return
    folder = Path(str(path)).expanduser()
    is_name_of_hub = str(path).count("/") == 1 and not str(path).startswith((".", "~", "/"))
    if is_name_of_hub and not folder.exists():
        return
    if not (folder / "adapter_config.json").is_file():
        answers.lack(
            str(path),
            f"{MODEL}.lora_adapter_path={path}: no adapter is there (no adapter_config.json). Name "
            "the folder of an adapter that peft saved",
        )


def look_at_reward_model(config: Any, answers: Answers) -> None:
    """Compare what `RewardModelManager` gets with what it needs."""
    block = config.reward.reward_model
    if not block.enable:
        return
    key = "reward.reward_model"
    if not block.get("model_path"):
        answers.problems.append(
            f"{key}.model_path={block.get('model_path')} with {key}.enable=True: the reward "
            "model's server needs a model. Name its folder or hub name"
        )
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if block.enable_resource_pool:
        for name in ("n_gpus_per_node", "nnodes"):
            if block[name] <= 0:
                answers.problems.append(
                    f"{key}.{name}={block[name]} with {key}.enable_resource_pool=True: expected a "
                    "number of 1 or more"
                )
        gpus = block.n_gpus_per_node * block.nnodes
    rollout = block.rollout
    for_one = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    for_one *= rollout.pipeline_model_parallel_size
    # verl.single_controller.ray.base.split_resource_pool asks for whole parts
    if gpus > 0 and gpus % for_one:
        answers.problems.append(
            f"{key}.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: one "
            f"server takes {for_one} GPUs, and the reward model has {gpus}, which is no multiple "
            f"of that. Set a divisor of {gpus}"
        )
