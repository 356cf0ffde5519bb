"""Trains on GSM8K's three rewards with TRL's own trainer and its GDPO, here without a GPU.

The settings are those of `task=gsm8k hardware=cpu` in recipes/, where TRL has them.
docs/without_verl.md says what differs from a run of verl.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from verl_gdpo.tasks import TASKS
from verl_gdpo.trl_rewards import reward_funcs

PROMPTS, GENERATIONS = 8, 16  # a step, and of a prompt


def make_trainer(data: Path, policy: Path, out: Path, steps: int, seed: int = 0) -> GRPOTrainer:
    """A trainer of the policy in the folder `policy` on the rows of `data`/train.parquet."""
    config = GRPOConfig(
        output_dir=str(out),
        # GDPO: each reward is normalised in its group, then their sum over the batch
        multi_objective_aggregation="normalize_then_sum",
        # one update a step, on the whole batch
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=24,
        temperature=1.0,
        max_steps=steps,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # as a share
        weight_decay=0.01,
        beta=0.04,  # KL in the loss
        epsilon=0.2,
        seed=seed,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=str(policy),
        reward_funcs=reward_funcs(TASKS["gsm8k"]),
        args=config,
        train_dataset=Dataset.from_parquet(str(data / "train.parquet")),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet")
    parser.add_argument("--policy", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="gets the model and the curves")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    trainer = make_trainer(args.data, args.policy, args.out, args.steps, args.seed)
    trainer.train()
    trainer.save_model()
    trainer.save_state()  # trainer_state.json has every reward of every step
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(f"{'reward':<12} first step  last step")
    for name in trainer.reward_func_names:
        first, last = (entry[f"rewards/{name}/mean"] for entry in (steps[0], steps[-1]))
        print(f"{name:<12} {first:10.3f} {last:10.3f}")


if __name__ == "__main__":
    main()
