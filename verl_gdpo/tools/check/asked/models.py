"""What the configuration of a model that is on this machine says about a run."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.batches import look_at_heads, look_at_parallelism_of_model
from verl_gdpo.tools.check.asked.megatron import look_at_layers
from verl_gdpo.tools.check.asked.roles import MODEL, ROLLOUT, Roles, engine_key
from verl_gdpo.tools.check.prompts import tokenizer_of_run
from verl_gdpo.tools.check.verl_questions import trains_critic

POSITIONS = "max_position_embeddings"
PLACEHOLDER = "~/models/deepseek-llm-7b-chat"  # of verl's configuration
LAYERS = "transformer_layer_cls_to_wrap"
TEMPLATES = (f"{MODEL}.custom_chat_template", "data.apply_chat_template_kwargs.chat_template")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def look_at_model(config: Any, roles: Roles, answers: Answers) -> None:
    """Read the policy's configuration as verl's workers do, and compare the run with it."""
    model = config.actor_rollout_ref.model
    _look_at_templates(config, answers)
    if model.get("external_lib"):
        from verl.utils.import_utils import import_external_libs

        key = f"{MODEL}.external_lib={model.external_lib}"
        answers.ask(key, import_external_libs, model.external_lib)
    made = _read_model(MODEL, model, answers)
    if made is None:
        return
    look_at_parallelism_of_model(config, roles, made.hf_config, answers)
    look_at_layers(config, roles, made.hf_config, answers)
    _look_at_positions(MODEL, config, made.hf_config, answers)
    _look_at_length_of_rollout(config, made.hf_config, answers)
    _look_at_vocabulary(MODEL, config, made.hf_config, answers)
    if model.get("lora_rank", 0) > 0:
        _look_at_targets(made, answers)
    for key, role in roles.with_engines():
        if key != "critic":
            _look_at_layers_to_wrap(key, role.engine, made, answers)


def look_at_critic_model(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare the run with the critic's model, which gets the rows of the policy's tokenizer."""
    if roles.critic is None:
        return
    key = "critic.model"
    made = _read_model(key, config.critic.model, answers)
    if made is None:
        return
    look_at_heads("critic", roles.critic, key, made.hf_config, answers)
    _look_at_positions(key, config, made.hf_config, answers)
    _look_at_vocabulary(key, config, made.hf_config, answers)
    _look_at_layers_to_wrap("critic", roles.critic.engine, made, answers)


def look_at_folders_of_models(config: Any, answers: Answers) -> None:
    """Say which models and tokenizers are not here, if they are folders and no names of a hub."""
    keys = [f"{MODEL}.path"]
    if trains_critic(config):
        keys.append("critic.model.path")
    reward_model = config.reward.reward_model
    if reward_model.enable and reward_model.get("model_path"):
        keys.append("reward.reward_model.model_path")
    for key in keys:
        value = OmegaConf.select(config, key)
        path = str(value)
        folder = Path(path).expanduser()
        if value is None or path.startswith(("http://", "https://")):
            answers.problems.append(
                f"{key}={value}: expected the folder of a model, or its name on a hub, such as "
                "Qwen/Qwen2.5-1.5B-Instruct"
            )
        elif (folder / "config.json").is_file():
            _look_at_weights(f"{key}={path}", folder, answers)
        elif path == PLACEHOLDER:
            answers.problems.append(
                f"{key}={path}: this is verl's default, and no model is there. Name the folder of "
                "a model, or one of a hub such as Qwen/Qwen2.5-1.5B-Instruct"
            )
        elif _is_folder_name(path, config):
            sentence = (
                f"{key}={path}: no model is there (no config.json). Name the folder of a model, or "
                "one of a hub such as Qwen/Qwen2.5-1.5B-Instruct. For tool_rl without a GPU, a "
                "tiny policy is in cpu/tool_rl_policy, beside the folder of `verl-gdpo recipes`"
            )
            if config.get("data_dir") and path.startswith(str(config.data_dir)):
                answers.problems.append(sentence)  # The rows of our recipes are there too.
            else:
                answers.lack(path, sentence)
    for name in ("tokenizer_path", "hf_config_path"):
        path = str(config.actor_rollout_ref.model.get(name) or "")
        if path and _is_folder_name(path, config) and not Path(path).expanduser().is_dir():
            answers.lack(path, f"{MODEL}.{name}={path}: there is no such folder")


def _is_folder_name(path: str, config: Any) -> bool:
    """Whether a model's name can only be a folder: a hub's has one slash at most."""
    starts = (str(config.get("data_dir") or "/"), "/", ".", "~")
    return path.startswith(starts) or (path.count("/") > 1 and "://" not in path)


def _look_at_weights(key: str, folder: Path, answers: Answers) -> None:
    """transformers' `from_pretrained` ends a run without weights, once Ray has started."""
    if not any(file.suffix in WEIGHTS for file in folder.iterdir()):
        answers.warnings.append(
            f"{key}: a configuration is there, and no weights ({', '.join(WEIGHTS)}). The folder "
            "'huggingface' of a checkpoint has them only if hf_model is in save_contents; `python "
            "-m verl.model_merger merge` makes them of the other files"
        )


def _read_model(key: str, model: Any, answers: Answers) -> Any:
    """Return verl's object of a model without its tokenizer; None if it cannot be read here."""
    where = f"{key}.path={model.path}"
    unknown = "so its heads, its positions and its vocabulary were not compared with the run"
    folder = folder_of_model(str(model.get("hf_config_path") or model.path))
    if folder is None:
        answers.notes.append(f"{where}: not on this machine, {unknown}")
        return None
    if has_own_code(folder):
        if not model.get("trust_remote_code"):
            answers.warnings.append(
                f"{where}: has code of its own, and {key}.trust_remote_code is False: transformers "
                "refuses it, unless it has code for this kind of model itself"
            )
        answers.notes.append(f"{where}: has code of its own, which is not run here, {unknown}")
        return None
    return answers.ask(where, _make_model_config, model, folder)


def _look_at_templates(config: Any, answers: Answers) -> None:
    """Let jinja read the chat templates that the run has of its own.

    verl.workers.config.model.HFModelConfig gives the text itself to the tokenizer, and so does
    transformers with an option of `apply_chat_template`: neither opens a file.
    """
    for key in TEMPLATES:
        template = OmegaConf.select(config, key)
        if template is not None:
            _look_at_template(key, str(template), answers)


def _look_at_template(key: str, template: str, answers: Answers) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    has_marks = "{{" in template or "{%" in template
    if not template.strip():
        answers.problems.append(
            f"{key}={template}: verl takes this empty text itself for the template, so each prompt "
            "would be empty. Leave it out for the template of the model"
        )
        return
    if not has_marks:
        answers.problems.append(
            f"{key}={template}: verl takes this text itself for the template, so each prompt would "
            "be this text. Write the template here, or put it into the folder of "
            f"{MODEL}.path as chat_template.jinja"
        )
        return
    try:
        _compile_jinja_template(template)
    except Exception as error:
        answers.problems.append(
            f"{key}: no template of jinja: {error}. verl takes the text of the template here, not "
            "a path"
        )
        return
    if "messages" not in template:
        answers.problems.append(
            f"{key}: the template does not read `messages`, so each prompt would be the same text. "
            "Write the template of a model that was trained with it"
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
        return "auto_map" in json.loads((folder / "config.json").read_bytes())
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


def _look_at_positions(key: str, config: Any, hf_config: Any, answers: Answers) -> None:
    """Compare the longest row with the positions of a model.

    Args:
        key: of the model's block.
    """
    positions = _positions(hf_config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if positions is not None and longest > positions:
        answers.problems.append(
            f"data.max_prompt_length={config.data.max_prompt_length} with "
            f"data.max_response_length={config.data.max_response_length}: the model has "
            f"{positions} positions ({POSITIONS} of {key}.path), fewer than the {longest} tokens "
            "of the longest row. Shorten the rows, or set "
            f"+{key}.override_config.{POSITIONS}={longest} with a way to extend its positions"
        )


def _look_at_length_of_rollout(config: Any, hf_config: Any, answers: Answers) -> None:
    """verl's servers compare their length with the model's positions."""
    positions = _positions(hf_config)
    length = config.actor_rollout_ref.rollout.get("max_model_len")
    if positions is not None and length is not None and length > positions:
        answers.problems.append(
            f"{ROLLOUT}.max_model_len={length}: the model has {positions} positions ({POSITIONS} "
            f"of {MODEL}.path), and verl's server refuses more. Set at most {positions}, or leave "
            "it out"
        )


def _positions(hf_config: Any) -> int | None:
    """Return how many tokens a model can read, as verl does; None for a model without a limit."""
    from verl.workers.rollout.utils import get_max_position_embeddings

    try:
        return int(get_max_position_embeddings(hf_config))
    except ValueError:
        return None  # verl's vLLM server takes none of these.


def _look_at_vocabulary(key: str, config: Any, hf_config: Any, answers: Answers) -> None:
    """Compare the policy's tokens with the rows of a model's embedding.

    A class of transformers may add a token of its own, as that of Qwen2 adds <|endoftext|>. Beyond
    the embedding, it does harm only where a text has it.

    Args:
        key: of the model's block.
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
    path = f"{key}.path={OmegaConf.select(config, f'{key}.path')}"
    if largest >= size:
        remedy = f"Take the tokenizer of this model ({MODEL}.tokenizer_path)"
        if key != MODEL:
            remedy = "Take a critic with the policy's vocabulary"
        answers.problems.append(
            f"{path}: the policy's tokenizer has tokens up to {largest}, and this model a "
            f"vocabulary of {size}. {remedy}"
        )
    elif unlikely:
        tokens = ", ".join(sorted(unlikely))
        answers.warnings.append(
            f"{path}: the policy's tokenizer has {tokens} beyond this model's vocabulary of "
            f"{size}, so that the run fails at a text that has it"
        )


def _look_at_targets(made: Any, answers: Answers) -> None:
    """Let peft put the adapter on the model's skeleton, which has no weights."""
    targets = made.target_modules
    if targets == "all-linear" or made.lora_adapter_path:
        return
    answers.ask(f"{MODEL}.target_modules={targets}", _put_adapter_on, made)


def _skeleton(made: Any) -> Any:
    """Return the model on torch's device without memory."""
    from verl.utils.model import get_hf_auto_model_class

    hf_config = deepcopy(made.hf_config)
    hf_config._attn_implementation = "eager"
    with torch.device("meta"):
        return get_hf_auto_model_class(hf_config=hf_config).from_config(hf_config)


def _put_adapter_on(made: Any) -> None:
    """As FSDPEngine._build_lora_module of verl 0.9.1."""
    from peft import LoraConfig, TaskType, get_peft_model

    model = _skeleton(made)
    with torch.device("meta"):
        options = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=made.lora_rank,
            lora_alpha=made.lora_alpha,
            target_modules=made.target_modules,
            exclude_modules=made.exclude_modules,
        )
        get_peft_model(model, options)


def _look_at_layers_to_wrap(key: str, engine: Any, made: Any, answers: Answers) -> None:
    """Let verl look up the layers that FSDP shall wrap, on the model's skeleton.

    verl's default needs no look: those that the model's own class names.
    """
    if "FSDP" not in type(engine).__name__ or not engine.wrap_policy.get(LAYERS):
        return
    where = f"{engine_key(key)}.wrap_policy.{LAYERS}={engine.wrap_policy[LAYERS]}"
    answers.ask(where, _find_layers, made, engine)


def _find_layers(made: Any, engine: Any) -> None:
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy

    skeleton = _skeleton(made)
    try:
        get_fsdp_wrap_policy(skeleton, engine.wrap_policy)
    except Exception as error:  # verl raises no other kind here
        raise ValueError(f"{error}. The model has {skeleton._no_split_modules}") from error
