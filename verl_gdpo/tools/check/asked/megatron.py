"""What Megatron-Core would refuse. It is seldom where check runs, so these are rules.

Each names the place in Megatron-Core, or in verl, that it follows.
"""

from typing import Any

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.names import unknown_name
from verl_gdpo.tools.check.asked.roles import ACTOR, MODEL, Roles

# megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.get_lr and get_wd
DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")
WSD_STYLES = ("linear", "exponential", "cosine", "minus_sqrt")
# megatron.core.transformer.transformer_config.TransformerConfig.__post_init__
GRANULARITIES = ("full", "selective")
METHODS = ("block", "uniform")
BACKENDS = ("flash", "fused", "unfused", "local", "auto")
# With one of these, the stages of a pipeline need no equal numbers of layers.
UNEQUAL_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def look_at_megatron(config: Any, roles: Roles, steps: int | None, answers: Answers) -> None:
    """Compare the engines of all roles with what Megatron-Core takes.

    Args:
        steps: of the run; None if they are not known.
    """
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for key, role in roles.with_engines():
        if "Mcore" not in type(role.engine).__name__:
            continue
        _look_at_engine(f"{key}.megatron", role.engine, gpus, answers)
        _look_at_transformer(f"{key}.megatron", role.engine, answers)
        if not role.engine.forward_only and "Mcore" in type(role.optim).__name__:
            _look_at_optimizer(f"{key}.optim", role.optim, steps, answers)
    is_megatron = roles.actor is not None and "Mcore" in type(roles.actor.engine).__name__
    model = config.actor_rollout_ref.model
    if (
        is_megatron
        and model.get("lora_rank", 0) > 0
        and (model.get("lora") or {}).get("rank", 0) <= 0
    ):
        # verl.workers.config.megatron_peft.get_peft_cls reads lora.rank alone
        answers.problems.append(
            f"{MODEL}.lora_rank={model.lora_rank} with {ACTOR}.strategy=megatron: Megatron reads "
            f"{MODEL}.lora.rank, so no adapter would be trained, and the reference would be the "
            f"policy itself. Set {MODEL}.lora.rank={model.lora_rank}"
        )


def _look_at_engine(key: str, engine: Any, gpus: int, answers: Answers) -> None:
    if not engine.use_mbridge:
        # verl.workers.engine.megatron.transformer_impl.MegatronEngine.__init__ asserts it
        answers.problems.append(
            f"{key}.use_mbridge=False: verl's Megatron engine asks for True once its workers start"
        )
    # megatron.core.parallel_state.initialize_model_parallel
    for_one = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size
    for_one *= engine.context_parallel_size
    if gpus % for_one:
        answers.problems.append(
            f"{key}.tensor_model_parallel_size={engine.tensor_model_parallel_size}: with its "
            f"pipeline and context parallelism, one model takes {for_one} GPUs, and the run has "
            f"{gpus}, which is no multiple of that"
        )
    virtual = engine.virtual_pipeline_model_parallel_size
    if virtual is not None and engine.pipeline_model_parallel_size < 2:
        answers.problems.append(
            f"{key}.virtual_pipeline_model_parallel_size={virtual}: Megatron needs a pipeline of 2 "
            f"or more for it. Set {key}.pipeline_model_parallel_size, or leave it out"
        )
    if engine.use_dist_checkpointing:
        path = engine.dist_checkpointing_path
        if not path:
            answers.problems.append(
                f"{key}.dist_checkpointing_path={path} with {key}.use_dist_checkpointing=True: the "
                "weights are read from there. Name the folder, or set use_dist_checkpointing=False"
            )


def _look_at_transformer(key: str, engine: Any, answers: Answers) -> None:
    given = engine.override_transformer_config or {}
    block = f"{key}.override_transformer_config"
    for name, known in (
        ("recompute_granularity", GRANULARITIES),
        ("recompute_method", METHODS),
        ("attention_backend", BACKENDS),
    ):
        answers.problems += unknown_name(f"{block}.{name}", given.get(name), known)
    if given.get("recompute_granularity") == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if given.get(name) is None:
                answers.problems.append(
                    f"{block}.{name}={given.get(name)} with recompute_granularity=full: Megatron "
                    "asks for both. Set recompute_method=uniform and recompute_num_layers=1"
                )


def _look_at_optimizer(key: str, options: Any, steps: int | None, answers: Answers) -> None:
    """See megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.__init__."""
    for name, known in (
        ("lr_decay_style", DECAY_STYLES),
        ("weight_decay_incr_style", WEIGHT_DECAY_STYLES),
    ):
        answers.problems += unknown_name(f"{key}.{name}", options.get(name), known)
    if options.lr_decay_style == "WSD":
        style = options.lr_wsd_decay_style
        answers.problems += unknown_name(f"{key}.lr_wsd_decay_style", style, WSD_STYLES)
        if options.lr_wsd_decay_steps is None:
            answers.problems.append(
                f"{key}.lr_wsd_decay_steps=None with lr_decay_style=WSD: Megatron asks for the "
                "number of steps of the decay at the end"
            )
    for name in ("min_lr", "lr_warmup_init"):
        if options.get(name, 0) > options.lr:
            answers.problems.append(
                f"{key}.{name}={options[name]} with {key}.lr={options.lr}: Megatron asks for at "
                "most the learning rate"
            )
    decay = options.lr_decay_steps or steps
    warm_up = options.lr_warmup_steps
    if decay is None:
        return
    if warm_up <= 0:
        warm_up = int(options.lr_warmup_steps_ratio * decay)
    if warm_up >= decay:
        answers.problems.append(
            f"{key}.lr_warmup_steps={warm_up}: Megatron asks for fewer than the {decay} steps in "
            "which the learning rate decays"
        )


def look_at_layers(config: Any, roles: Roles, hf_config: Any, answers: Answers) -> None:
    """Compare the stages of the pipelines with the layers of the policy's model."""
    layers = getattr(hf_config.get_text_config(), "num_hidden_layers", None)
    for key, role in roles.with_engines():
        engine = role.engine
        if key == "critic" or "Mcore" not in type(engine).__name__ or not isinstance(layers, int):
            continue
        given = engine.override_transformer_config or {}
        if any(given.get(name) for name in UNEQUAL_STAGES):
            continue
        stages = engine.pipeline_model_parallel_size
        stages *= engine.virtual_pipeline_model_parallel_size or 1
        if layers % stages:
            answers.problems.append(
                f"{key}.megatron.pipeline_model_parallel_size="
                f"{engine.pipeline_model_parallel_size}: the model at {MODEL}.path has {layers} "
                f"layers, which cannot be shared equally by {stages} stages. Set a divisor, or "
                "num_layers_in_first_pipeline_stage under override_transformer_config"
            )
