"""Files and folders that a run reads or makes: checkpoints, dumps, tools, agent loops, adapters."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.settings import hint
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import MODEL, ROLLOUT

MADE_FOLDERS = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
)
TOOL_AGENT = "tool_agent"


def look_at_folders(config: Any, answers: Answers) -> None:
    """Say which folders of a run cannot be made. None is made here."""
    for key in MADE_FOLDERS:
        folder = OmegaConf.select(config, key)
        if not folder or "://" in str(folder):
            continue
        if key == "trainer.default_local_dir" and config.trainer.save_freq <= 0:
            continue
        reason = _why_not_made(Path(str(folder)).expanduser().absolute())
        if reason:
            answers.problems.append(f"{key}={folder}: {reason}. Name a folder that can be made")


def _why_not_made(folder: Path) -> str:
    """Return why a folder cannot be made or written; an empty text if it can."""
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK) or not _takes_files(nearest):
        return f"nothing can be written in {nearest}"
    return ""


def _takes_files(folder: Path) -> bool:
    """Whether the file system of a folder takes files: those of the kernel do not, even of root."""
    kernels = [Path("/proc"), Path("/sys")]
    return not any(folder == kernel or kernel in folder.parents for kernel in kernels)


def look_at_resume(config: Any, answers: Answers) -> None:
    """Say whether the checkpoint of `trainer.resume_mode=resume_path` is there.

    verl.trainer.ppo.v1.trainer_base.PPOTrainer._load_checkpoint looks for it once all models are
    loaded.
    """
    trainer = config.trainer
    if trainer.resume_mode != "resume_path":
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
    if "://" not in path and not (Path(path).absolute() / "actor").is_dir():
        missing = "no folder 'actor' is in it" if Path(path).is_dir() else "there is no such folder"
        answers.problems.append(f"{key}: {missing}; {expected}")


def look_at_agent_loops(config: Any, answers: Answers) -> None:
    """Read what `AgentLoopWorker.__init__` reads: tools, loops, and the parser of calls."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.utils.import_utils import load_class_from_fqn

    agent = config.actor_rollout_ref.rollout.agent
    path = agent.get("agent_loop_config_path")
    known = set(map(str, _agent_loop_registry))
    if path:
        key = f"{ROLLOUT}.agent.agent_loop_config_path={path}"
        of_file = answers.ask(key, _loops_of_file, str(path))
        if of_file is not None and agent.default_agent_loop not in {*known, *of_file}:
            answers.problems.append(
                f"{ROLLOUT}.agent.default_agent_loop={agent.default_agent_loop}: unknown to verl, "
                f"and not in {path}, which has {of_file}"
            )
    manager = agent.get("agent_loop_manager_class")
    if manager:
        key = f"{ROLLOUT}.agent.agent_loop_manager_class={manager}"
        answers.ask(key, load_class_from_fqn, manager, "AgentLoopManager")
    if agent.default_agent_loop == TOOL_AGENT:
        _look_at_parser(config, answers)
    tools = config.actor_rollout_ref.rollout.multi_turn.get("tool_config_path")
    if tools:
        answers.ask(f"{ROLLOUT}.multi_turn.tool_config_path={tools}", _import_tools, str(tools))
    functions = config.actor_rollout_ref.rollout.multi_turn.get("function_tool_path")
    if functions:
        key = f"{ROLLOUT}.multi_turn.function_tool_path={functions}"
        answers.ask(key, _found, str(functions))


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


def _found(path: str) -> str:
    """Return the path as verl finds it.

    Raises:
        FileNotFoundError: it is not there.
    """
    from verl.utils.import_utils import resolve_config_path

    found = str(resolve_config_path(path))
    if not Path(found).is_file():
        raise FileNotFoundError("there is no such file")
    return found


def _loops_of_file(path: str) -> list[str]:
    """Return the names of the loops in a file, whose classes are imported and not made."""
    from hydra.utils import get_object

    names = []
    loops: Any = OmegaConf.load(_found(path))
    for loop in loops:
        try:
            get_object(loop._target_)
        except Exception as error:
            raise ImportError(f"loop {loop.name}: {error}") from error
        names.append(str(loop.name))
    return names


def _import_tools(path: str) -> None:
    """Import the classes of the tools in a file. None is made: some of verl's own start Ray."""
    from verl.tools.tool_registry import ToolType, get_tool_class

    tools: Any = OmegaConf.load(_found(path))
    for tool in tools.tools:
        module = str(tool.class_name).rpartition(".")[0]
        try:
            ToolType(tool.config.type)
            if find_spec(module) is None:
                raise ImportError(f"there is no module {module}")
            get_tool_class(tool.class_name)
        except Exception as error:
            raise ValueError(f"class_name {tool.class_name}: {error}") from error


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
        answers.problems.append(
            f"{MODEL}.lora_adapter_path={path}: no adapter is there (no adapter_config.json). Name "
            "the folder of an adapter that peft saved"
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
