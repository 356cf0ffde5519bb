"""The numbers that engines take, and those that have to fit each other."""

from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Roles,
)

# how the engines call the length of a model
LENGTHS = {"vllm": "max_model_len", "sglang": "context_length"}
AT_LEAST_1 = (
    f"{ROLLOUT}.agent.num_workers",  # verl.trainer.ppo.v1.agent_loop_tq: a batch for each of them
    f"{ROLLOUT}.max_num_seqs",
    f"{ROLLOUT}.max_num_batched_tokens",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{ROLLOUT}.multi_turn.max_parallel_calls",
    f"{ROLLOUT}.multi_turn.max_tool_response_length",
    "reward.sandbox_fusion.max_concurrent",  # of a semaphore, at which 0 waits for ever
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
    "data.filter_overlong_prompts_workers",  # datasets.Dataset.filter, its num_proc
)
AT_LEAST_0 = ("algorithm.kl_ctrl.kl_coef", "critic.cliprange_value")
SHARES = ("algorithm.gamma", "algorithm.lam")


def look_at_numbers(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare numbers with what engines take, and with each other."""
    for key in AT_LEAST_1:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and value < 1:
            answers.problems.append(f"{key}={value}: expected a number of 1 or more")
    for key in AT_LEAST_0:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and value < 0:
            answers.problems.append(f"{key}={value}: expected a number of 0 or more")
    for key in SHARES:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and not 0 <= value <= 1:
            answers.problems.append(f"{key}={value}: expected a number from 0 to 1")
    _look_at_lengths(config, answers)
    _look_at_sampling(config, answers)
    _look_at_clipping(roles, answers)
    _look_at_clipped_ratios(config, answers)
    _look_at_filter(config, answers)
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    lengths = {f"{ROLLOUT}.max_model_len": rollout.get("max_model_len")}
    if rollout.name in LENGTHS:
        key = f"{ROLLOUT}.engine_kwargs.{rollout.name}.{LENGTHS[rollout.name]}"
        lengths[key] = OmegaConf.select(config, key)
    for key, length in lengths.items():
        if length is None or length >= longest:
            continue
        # vLLM and SGLang end a response where the length of the model ends, and take no longer
        # prompt: verl's servers give them max_model_len - prompt at most.
        answers.problems.append(
            f"{key}={length}: a prompt and its response may have {longest} "
            f"tokens (data.max_prompt_length={config.data.max_prompt_length} and "
            f"data.max_response_length={config.data.max_response_length}). Raise it, leave it "
            "out, or shorten the rows"
        )
    _look_at_batches_of_vllm(config, answers)
    _look_at_copies_of_sglang(config, answers)
    _look_at_steps_to_profile(config, answers)
    trainer = config.trainer
    if trainer.val_only and not trainer.val_before_train:
        # verl.trainer.ppo.v1.trainer_base.PPOTrainer.fit ends there only after the first validation
        answers.problems.append(
            "trainer.val_only=True with trainer.val_before_train=False: verl would train. Set "
            "trainer.val_before_train=True to validate alone"
        )
    model = config.actor_rollout_ref.model
    tiled = model.get("tiled_mlp") or {}
    shards = tiled.get("num_shards", 1)
    if tiled.get("enabled") and shards < 1:
        answers.problems.append(
            f"{MODEL}.tiled_mlp.num_shards={shards}: expected a number of 1 or more"
        )


def _look_at_batches_of_vllm(config: Any, answers: Answers) -> None:
    """See vllm.config.scheduler.SchedulerConfig.verify_max_model_len."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    tokens = rollout.max_num_batched_tokens
    if tokens < rollout.max_num_seqs:
        answers.problems.append(
            f"{ROLLOUT}.max_num_batched_tokens={tokens} with {ROLLOUT}.max_num_seqs="
            f"{rollout.max_num_seqs}: vLLM needs a token for each sequence. Raise the former"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    longest = rollout.get("max_model_len") or longest
    if not rollout.enable_chunked_prefill and tokens < longest:
        answers.problems.append(
            f"{ROLLOUT}.max_num_batched_tokens={tokens} with {ROLLOUT}.enable_chunked_prefill="
            f"False: vLLM has to take a whole prompt at once, of up to {longest} tokens. Raise it, "
            "or set enable_chunked_prefill=True"
        )


def _look_at_copies_of_sglang(config: Any, answers: Answers) -> None:
    """SGLang takes new weights in copies of the model only where they share the attention."""
    rollout = config.actor_rollout_ref.rollout
    copies = rollout.data_parallel_size
    key = f"{ROLLOUT}.engine_kwargs.sglang.enable_dp_attention"
    if rollout.name == "sglang" and copies > 1 and not OmegaConf.select(config, key):
        answers.problems.append(
            f"{ROLLOUT}.data_parallel_size={copies} with {ROLLOUT}.name=sglang: its weights could "
            f"not be updated. Set +{key}=True, or data_parallel_size=1: verl starts as many "
            "servers as fit on the GPUs"
        )


def _look_at_filter(config: Any, answers: Answers) -> None:
    """verl.trainer.ppo.v1.replay_buffer.ReplayBuffer drops groups whose responses are all alike."""
    groups = config.algorithm.get("filter_groups") or {}
    n = config.actor_rollout_ref.rollout.n
    if groups.get("enable") and config.trainer.get("use_v1", False) and n == 1:
        answers.problems.append(
            f"algorithm.filter_groups.enable=True with {ROLLOUT}.n=1: a group of one response is "
            "always dropped, so the run would generate for ever"
        )


def _look_at_steps_to_profile(config: Any, answers: Answers) -> None:
    """PPOTrainer.fit looks for each step in the list."""
    steps = config.global_profiler.get("steps")
    if steps is not None and not isinstance(steps, ListConfig):
        answers.problems.append(
            f"global_profiler.steps={steps}: expected a list of steps, as in [{steps}]"
        )


def _look_at_lengths(config: Any, answers: Answers) -> None:
    """verl's agent loops read the lengths of the rollout, which follow those of the data."""
    for name in ("prompt_length", "response_length"):
        length = OmegaConf.select(config, f"{ROLLOUT}.{name}")
        of_data = config.data[f"max_{name}"]
        if type(length) is int and length != of_data:
            answers.warnings.append(
                f"{ROLLOUT}.{name}={length} with data.max_{name}={of_data}: the former counts for "
                "what is generated, and follows the latter if it is left out"
            )


def _look_at_sampling(config: Any, answers: Answers) -> None:
    """vllm.sampling_params.SamplingParams._verify_args; SGLang's SamplingParams.verify is alike."""
    for block in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        top_k = OmegaConf.select(config, f"{block}.top_k")
        if type(top_k) is int and top_k < -1:
            answers.problems.append(
                f"{block}.top_k={top_k}: expected -1 for all tokens, or a number of 1 or more"
            )
        temperature = OmegaConf.select(config, f"{block}.temperature")
        if type(temperature) in (int, float) and temperature < 0:
            answers.problems.append(f"{block}.temperature={temperature}: expected 0 or more")
    penalty = OmegaConf.select(config, f"{ROLLOUT}.repetition_penalty")
    if type(penalty) in (int, float) and penalty <= 0:
        answers.problems.append(f"{ROLLOUT}.repetition_penalty={penalty}: expected more than 0")


def _look_at_clipping(roles: Roles, answers: Answers) -> None:
    """torch scales each gradient by clip_grad / norm, so 0 leaves nothing of it."""
    for key, role in ((ACTOR, roles.actor), ("critic", roles.critic)):
        if role is None or "FSDP" not in type(role.engine).__name__:
            continue
        clip = role.optim.clip_grad
        if clip is None or clip <= 0:
            answers.problems.append(
                f"{key}.optim.clip_grad={clip}: each gradient would be scaled to {clip}, so "
                "nothing would be trained; expected more than 0"
            )


def _look_at_clipped_ratios(config: Any, answers: Answers) -> None:
    """verl.trainer.ppo.core_algos clips ratios to 1 - low and 1 + high."""
    actor = config.actor_rollout_ref.actor
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        value = actor.get(name)
        # CISPO, for one, is trained with bounds of 4 or more.
        is_usual_loss = actor.policy_loss.loss_mode in ("vanilla", "gspo")
        if is_usual_loss and type(value) in (int, float) and value >= 1:
            answers.warnings.append(
                f"{ACTOR}.{name}={value}: ratios are clipped at 1 - this and 1 + this, so that "
                "hardly any would be; verl's default is 0.2"
            )
    if actor.policy_loss.loss_mode != "clip_cov":
        return
    # compute_policy_loss_clip_cov takes tokens whose covariance is between the two.
    low = actor.policy_loss.clip_cov_lb
    high = actor.policy_loss.clip_cov_ub
    if low is not None and high is not None and low >= high:
        answers.problems.append(
            f"{ACTOR}.policy_loss.clip_cov_lb={low} with {ACTOR}.policy_loss.clip_cov_ub={high}: "
            "no token is between them, so nothing would be clipped. Exchange them"
        )
