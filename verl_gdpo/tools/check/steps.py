"""How many steps a run trains, and what would leave it none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

# they compare the responses to one prompt; others have a baseline of another kind
COMPARING = ("gdpo", "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")


def count_steps(config: Any, row_count: int) -> list[str]:
    """Return remarks about the steps that these training rows allow.

    Raises:
        ValueError: there is no step, or none that trains the policy.
    """
    limit = config.data.get("train_max_samples", -1)
    row_count = min(row_count, limit) if limit > 0 else row_count
    batch_size, epochs = config.data.train_batch_size, config.trainer.total_epochs
    for key in ("train_batch_size", "gen_batch_size"):
        if row_count < (config.data.get(key) or 1):
            raise ValueError(
                f"data.train_files: {row_count} rows are less than one batch of "
                f"data.{key}={config.data[key]}, so an epoch would have no step. Lower it, or add "
                "rows"
            )
    possible = row_count // max(batch_size, 1) * epochs
    wanted = config.trainer.total_training_steps
    steps = possible if wanted is None else min(possible, wanted)
    remarks = [f"{steps} training steps", *_finished_steps(config, steps)]
    if config.trainer.critic_warmup > steps > 0:
        raise ValueError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} is more than the {steps} steps "
            "of the run, so the policy would never be trained"
        )
    if wanted is not None and wanted > possible:
        remarks.append(
            f"trainer.total_training_steps={wanted}, but trainer.total_epochs={epochs} end the run "
            f"after {possible} steps, without the validation and checkpoint of the last step"
        )
    if not config.data.get("filter_overlong_prompts", False):
        remarks.append(
            "data.filter_overlong_prompts=False: if a prompt is longer than "
            f"data.max_prompt_length={config.data.max_prompt_length} tokens, verl silently cuts "
            "off its beginning"
        )
    return remarks


def _finished_steps(config: Any, steps: int) -> Iterator[str]:
    """Say after which step verl goes on; raise ValueError if that is the last one."""
    folder = Path(str(config.trainer.default_local_dir))
    tracker = folder / "latest_checkpointed_iteration.txt"
    if config.trainer.resume_mode != "auto" or not tracker.is_file():
        return
    done = int(tracker.read_text())
    if done >= steps:
        raise ValueError(
            f"trainer.default_local_dir={folder} has the checkpoint of step {done}, and "
            f"trainer.resume_mode=auto goes on after it, so none of {steps} steps is left. Set "
            "another folder, more steps, or trainer.resume_mode=disable"
        )
    yield f"trainer.resume_mode=auto: the run goes on after step {done}, from {folder}"


def why_nothing_is_trained(config: Any) -> list[str]:
    """What leaves the policy as it is: one sentence for each reason."""
    return [] if _only_validates(config) else [*_reasons(config)]


def _only_validates(config: Any) -> bool:
    return bool(config.trainer.val_only and config.trainer.val_before_train)


def _reasons(config: Any) -> Iterator[str]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if config.trainer.total_epochs < 1:
        yield f"trainer.total_epochs={config.trainer.total_epochs}: nothing would be trained"
    steps = config.trainer.total_training_steps
    if steps is not None and steps < 1:
        yield f"trainer.total_training_steps={steps}: nothing would be trained"
    if actor.optim.lr <= 0:
        yield (f"actor_rollout_ref.actor.optim.lr={actor.optim.lr}: the policy would stay as it is")
    if actor.ppo_epochs < 1:
        yield f"actor_rollout_ref.actor.ppo_epochs={actor.ppo_epochs}: nothing would be trained"
    estimator = config.algorithm.adv_estimator
    if rollout.temperature <= 0 and estimator in COMPARING:
        yield (
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}: all responses to a "
            f"prompt would be the same, so adv_estimator={estimator} would compare nothing"
        )


def what_else_to_know(config: Any) -> Iterator[str]:
    """Remarks about what a run would do, if that is likely not meant."""
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if _only_validates(config):
        yield "trainer.val_only=True: the run validates once, and trains nothing"
    if estimator in COMPARING and n == 1:
        yield (
            f"actor_rollout_ref.rollout.n=1 with adv_estimator={estimator}: there is nothing to "
            "compare a response with, so its advantage is its score"
        )
