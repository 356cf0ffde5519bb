"""What the configuration of a model that is on this machine says about a run."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from omegaconf import open_dict

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.batches import look_at_parallelism_of_model
from verl_gdpo.tools.check.asked.roles import MODEL, ROLLOUT, Roles
from verl_gdpo.tools.check.prompts import tokenizer_of_run

POSITIONS = "max_position_embeddings"


def look_at_model(config: Any, roles: Roles, answers: Answers) -> None:
    """Read the policy's configuration as verl's workers do, and compare the run with it."""
    model = config.actor_rollout_ref.model
    _look_at_template(model, answers)
    for key in ("tokenizer_path", "hf_config_path"):
        path = model.get(key)
        if path and _is_missing_folder(str(path)):
            answers.problems.append(f"{MODEL}.{key}={path}: there is no such folder")
    if model.get("external_lib"):
        from verl.utils.import_utils import import_external_libs

        key = f"{MODEL}.external_lib={model.external_lib}"
        answers.ask(key, import_external_libs, model.external_lib)
    folder = folder_of_model(str(model.get("hf_config_path") or model.path))
    if folder is None:
        answers.notes.append(
            f"{MODEL}.path={model.path}: not on this machine, so its heads, its positions and its "
            "vocabulary were not compared with the run"
        )
        return
    if has_own_code(folder):
        if not model.get("trust_remote_code"):
            answers.warnings.append(
                f"{MODEL}.path={model.path}: has code of its own, and {MODEL}.trust_remote_code is "
                "False: transformers refuses it, unless it has code for this kind of model itself"
            )
        answers.notes.append(
            f"{MODEL}.path={model.path}: has code of its own, which is not run here, so its heads, "
            "its positions and its vocabulary were not compared with the run"
        )
        return
    made = answers.ask(f"{MODEL}.path={model.path}", _make_model_config, model, folder)
    if made is None:
        return
    look_at_parallelism_of_model(config, roles, made.hf_config, answers)
    _look_at_positions(config, made.hf_config, answers)
    _look_at_vocabulary(config, made.hf_config, answers)
    if config.actor_rollout_ref.model.get("lora_rank", 0) > 0:
        _look_at_targets(made, answers)


def _is_missing_folder(path: str) -> bool:
    """Whether a path can only be a folder, and is none."""
    return path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir()


def _look_at_template(model: Any, answers: Answers) -> None:
    """Let jinja read a chat template of the run's own."""
    template = model.get("custom_chat_template")
    if template:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            _compile_jinja_template(template)
        except Exception as error:
            answers.problems.append(
                f"{MODEL}.custom_chat_template: no template of jinja: {error}. verl takes the text "
                "of the template here, not a path"
            )


def folder_of_model(path: str) -> Path | None:
    """Return the folder with a model's config.json; None if it is not on this machine.

    A hub's name is looked up among what was fetched before, without the network.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def has_own_code(folder: Path) -> bool:
    """Whether transformers would run code of the model's folder."""
    try:
        return "auto_map" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False  # transformers says what is wrong with it


def _make_model_config(model: Any, folder: Path) -> Any:
    """Let verl make its object of the model, without its tokenizer."""
    from verl.utils.config import omega_conf_to_dataclass

    block = deepcopy(model)
    with open_dict(block):
        block.path = block.hf_config_path = str(folder)
        block.load_tokenizer = False
        block.custom_chat_template = None  # It is given to the tokenizer.
        block.external_lib = None
        block.use_shm = False  # The model would be copied.
    return omega_conf_to_dataclass(block)


def _look_at_positions(config: Any, hf_config: Any, answers: Answers) -> None:
    """Compare lengths with verl.workers.rollout.utils.get_max_position_embeddings."""
    from verl.workers.rollout.utils import get_max_position_embeddings

    try:
        positions = get_max_position_embeddings(hf_config)
    except ValueError:
        return  # There are models without a limit; verl's vLLM server takes none of them.
    longest = config.data.max_prompt_length + config.data.max_response_length
    length = config.actor_rollout_ref.rollout.get("max_model_len")
    has = f"the model has {positions} positions ({POSITIONS} of {MODEL}.path)"
    if longest > positions:
        answers.problems.append(
            f"data.max_prompt_length={config.data.max_prompt_length} with "
            f"data.max_response_length={config.data.max_response_length}: {has}, fewer than the "
            f"{longest} tokens of the longest row. Shorten the rows, or set "
            f"+{MODEL}.override_config.{POSITIONS}={longest} with a way to extend its positions"
        )
    if length is not None and length > positions:
        answers.problems.append(
            f"{ROLLOUT}.max_model_len={length}: {has}, and verl's server refuses more. Set at most "
            f"{positions}, or leave it out"
        )


def _look_at_vocabulary(config: Any, hf_config: Any, answers: Answers) -> None:
    """Compare the tokenizer's tokens with the rows of the model's embedding.

    A class of transformers may add a token of its own, as that of Qwen2 adds <|endoftext|>. Beyond
    the embedding, it does harm only where a text has it.
    """
    size = getattr(hf_config.get_text_config(), "vocab_size", None)
    tokenizer = tokenizer_of_run(config)
    if tokenizer is None or not isinstance(size, int):
        return
    added = tokenizer.get_added_vocab()
    always_used = {tokenizer.pad_token_id, tokenizer.eos_token_id}
    largest = 0
    unlikely = []
    for token, number in tokenizer.get_vocab().items():
        if number >= size and token in added and number not in always_used:
            unlikely.append(token)
        else:
            largest = max(largest, number)
    path = f"{MODEL}.path={config.actor_rollout_ref.model.path}"
    if largest >= size:
        answers.problems.append(
            f"{path}: its tokenizer has tokens up to {largest}, and the model a vocabulary of "
            f"{size}. Take the tokenizer of this model ({MODEL}.tokenizer_path)"
        )
    elif unlikely:
        tokens = ", ".join(sorted(unlikely))
        answers.warnings.append(
            f"{path}: its tokenizer has {tokens} beyond the model's vocabulary of {size}, so that "
            "the run fails at a text that has it"
        )


def _look_at_targets(made: Any, answers: Answers) -> None:
    """Let peft put the adapter on the model's skeleton, which has no weights."""
    targets = made.target_modules
    if targets == "all-linear" or made.lora_adapter_path:
        return
    answers.ask(f"{MODEL}.target_modules={targets}", _put_adapter_on, made)


def _put_adapter_on(made: Any) -> None:
    """As FSDPEngine._build_lora_module of verl 0.9.1, on torch's device without memory."""
    from peft import LoraConfig, TaskType, get_peft_model
    from verl.utils.model import get_hf_auto_model_class

    skeleton = deepcopy(made.hf_config)
    skeleton._attn_implementation = "eager"
    with torch.device("meta"):
        model = get_hf_auto_model_class(hf_config=skeleton).from_config(skeleton)
        options = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=made.lora_rank,
            lora_alpha=made.lora_alpha,
            target_modules=made.target_modules,
            exclude_modules=made.exclude_modules,
        )
        get_peft_model(model, options)
