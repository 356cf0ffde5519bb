"""Makes run folders like those of verl and verl-gdpo, with rising curves and example groups."""

import json
import math
import random

from verl_gdpo import compute_gdpo_advantage

PROMPT = "<|im_start|>user\nWhat is the weather in Oslo?<|im_end|>\n<|im_start|>assistant\n"
# correctness and format of four rollouts of each prompt
GROUPS = {
    "tied": [(1, 0), (0, 1), (1, 1), (1, 0)],
    "cancelled": [(1, 0), (0, 1), (1, 0), (0, 1)],
    "agree": [(1, 1), (0, 0), (0, 0), (0, 0)],
    "equal": [(1, 1), (1, 1), (1, 1), (1, 1)],
}


def make_run(
    folder, arm="gdpo", seed=0, steps=60, own_metrics=True, configuration=True, output="answer"
):
    """Write a run; the curves of a seed differ from another's by noise that the seed decides."""
    noise = random.Random(f"{arm}{seed}")
    lines = []
    for step in range(steps + 1):
        data = _validation(arm, step, noise) if step in (0, steps // 2, steps) else {}
        data |= _training(arm, step, steps, noise, own_metrics) if step else {}
        lines.append({"step": step, "data": data})
    write_metrics(folder, lines)
    if configuration:
        (folder / "hydra" / ".hydra").mkdir(parents=True)
        (folder / "hydra" / ".hydra" / "config.yaml").write_text(_CONFIG.format(arm=arm, seed=seed))
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / f"{steps}.jsonl").write_text(rollout_dump(steps, output))
    return folder


def write_metrics(folder, lines):
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics" / "1.jsonl").write_text(text)


def rollout_dump(step, output="answer", groups=GROUPS):
    rewards = [row for rows in groups.values() for row in rows]
    uids = [name for name, rows in groups.items() for _ in rows]
    advantages = compute_gdpo_advantage(rewards, uids, [[1]] * len(uids))[:, 0]
    rows = [
        {
            "input": PROMPT.replace("Oslo", "Oslo" if uid == "tied" else uid),
            "output": f"{output} {i}",
            "gts": "4 degrees",
            "score": float(sum(pair)),
            "step": step,
            "uid": f"{uid}_{i}_0",
            "group": uid,
            "session": i,
            "data_source": "made",
            "response_tokens": 10 + i,
            "trained_tokens": 10 + i,
            "rewards": {"correctness": float(pair[0]), "format": float(pair[1])},
            "advantage": float(advantage),
            "is_padding": False,
        }
        for i, (uid, pair, advantage) in enumerate(zip(uids, rewards, advantages, strict=True))
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def _training(arm, step, steps, noise, own_metrics):
    speed = 4 if arm == "gdpo" else 2.5
    learnt = 1 - math.exp(-speed * step / steps)
    correctness = -0.3 + 2.8 * learnt + noise.gauss(0, 0.15)
    data = {
        "gdpo/correctness/mean": correctness,
        "gdpo/format/mean": min(1, 0.4 + 0.6 * learnt + noise.gauss(0, 0.03)),
        "response_length/mean": 40 - 9 * learnt + noise.gauss(0, 0.8),
    }
    if own_metrics:
        energy = 0.5 + 0.4 * learnt + noise.gauss(0, 0.03)
        data |= {
            "gdpo/correctness/share": energy,
            "gdpo/format/share": 1 - energy,
            "gdpo/correctness/energy": energy,
            "gdpo/format/energy": 1 - energy,
            "gdpo/correctness/correlation": 0.6 + 0.35 * learnt + noise.gauss(0, 0.02),
            "gdpo/format/correlation": 0.6 - 0.5 * learnt + noise.gauss(0, 0.05),
            "gdpo/tied_pairs_gdpo": 0.0,
            "gdpo/tied_pairs_grpo": 0.25 - 0.2 * learnt,
            "gdpo/distinct_gdpo": round(70 - 40 * learnt + noise.gauss(0, 3)),
            "gdpo/distinct_grpo": round(45 - 25 * learnt + noise.gauss(0, 3)),
            "gdpo/correctness/varies": 1 - 0.6 * learnt,
            "gdpo/format/varies": 1 - 0.9 * learnt,
            "gdpo/format/at_high": 0.4 + 0.5 * learnt,
            "gdpo/length_correlation": noise.gauss(-0.1, 0.05),
            "gdpo/no_signal": max(0, 0.1 + 0.4 * learnt + noise.gauss(0, 0.03)),
            "gdpo/cancelled": max(0, 0.05 + noise.gauss(0, 0.02)),
        }
    return data


def _validation(arm, step, noise):
    best = 2.3 if arm == "gdpo" else 2.0
    return {
        "val-aux/made/correctness/mean@1": best * (1 if step else 0.5) + noise.gauss(0, 0.1),
        "val-aux/made/format/mean@1": (0.97 if step else 0.1) + noise.gauss(0, 0.01),
        "val-core/made/reward/mean@1": 1.0,
    }


_CONFIG = """\
arm: {arm}
algorithm:
  adv_estimator: gdpo
  gdpo: {{rewards: null}}
data:
  seed: {seed}
  train_files: data/made/train.parquet
  train_batch_size: 4
reward:
  reward_manager: {{source: register, name: gdpo}}
  custom_reward_function: {{path: null}}
actor_rollout_ref:
  model: {{path: data/tool_rl_policy}}
  rollout: {{n: 4}}
"""
