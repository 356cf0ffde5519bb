"""verl's other trainers, tools and losses as whole runs without a GPU.

In the asynchronous trainers, rollout and training have processes of their own, and the checkpoint
engine "gloo" between them. Each of their runs goes on until a sample cannot be scored.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import oracle
import pandas as pd
import pytest
import tool_loop
import varied_reward
from footprint import footprint
from ray_session import ray_folder
from repository import REPO
from rollout_check import GRPO, check_rollouts
from small_trainings import check_error, overrides
from start_verl import run_verl
from tool_rows import tool_row

from verl_gdpo.tasks.tool_rl import score as tool_rl

HELP = Path(tool_loop.__file__).parent
POLICY = REPO / "verl_gdpo" / "cpu" / "tool_rl_policy"
# of the tool, of the tool that fails, and of verl for a name that is no tool
SAID = (tool_loop.ANSWER, f"': {tool_loop.REFUSAL}", "Unknown function '")
WEIGHTS = {"correctness": 1.0, "format": 1.0, "letters": 1.0, "brevity": 1.0}
SAMPLES = 4
MINI_BATCH = 4  # prompts
TRUTHS = {
    row["prompt"][-1]["content"]: row["reward_model"]["ground_truth"]
    for row in (tool_row(index, "train") for index in range(32))
}
BAD_ROW = r"extra_info.index 30: KeyError: 'a bug in the scorer' \[.*reward.py:\d+\]"
TRAINING = (
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "data.shuffle=False",
    "trainer.val_before_train=False",
    "trainer.test_freq=2",
    "trainer.total_training_steps=9",
)
REJECTION = (
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.98_1.02'",
)


def documented(main):
    """The settings of the command of docs/trainers.md with this main module, without a GPU."""
    page = (REPO / "docs" / "trainers.md").read_text()
    (block,) = re.findall(r"trainers.py -->\n```bash\n(.*?)```", page, re.S)
    commands = map(shlex.split, block.replace("\\\n", "").strip().split("\n\n"))
    (command,) = (one for one in commands if one[2] == main)
    recipe = ["--config-dir", "recipes", "--config-name", "train"]
    assert command[3 : 3 + len(recipe)] == recipe
    return [one.replace("backend=nccl", "backend=gloo") for one in command[3 + len(recipe) :]]


def train(tmp_path, settings, **more):
    """Run to the end in a folder for temporary files; nothing else may stay."""
    with ray_folder() as temporary:
        variable = "TMPDIR", temporary
        with footprint(variable) as found:
            run = run_verl(tmp_path, settings, **more, **dict([variable]))
        print(f"\n{found}, {len(run.steps())} steps")
        assert found.left == ()
    return run


def checked_rewards(rows):
    """The rewards of the rows, which are those of their texts."""
    for row in rows:
        (truth,) = (truth for question, truth in TRUTHS.items() if question in row["input"])
        assert row["gts"] in (truth, None)  # fully_async_policy's batches lack it
        again = tool_rl.score(row["output"], truth)
        again["letters"] = varied_reward.letters(row["output"])
        again["brevity"] = varied_reward.brevity(row["response_tokens"])
        assert row["rewards"] == pytest.approx(again, abs=1e-6)
        assert row["score"] == pytest.approx(sum(again.values()), abs=1e-5)
    return [[row["rewards"][name] for name in WEIGHTS] for row in rows]


def difference(rows, groups, **options):
    """The largest distance to the oracle, if the rows of these groups were one batch.

    Rejection takes a sample out of the loss, and its rewards stay in the statistics.
    """
    batch = [row for row in rows if row["group"] in groups]
    expected = oracle.gdpo(checked_rewards(batch), [row["group"] for row in batch], **options)
    return max(
        abs(row["advantage"] - (wanted if row["trained_tokens"] else 0.0))
        for row, wanted in zip(batch, expected, strict=True)
    )


def check_mini_batches(rows, count, tolerance=1e-5, **options):
    """The dump tells the mini-batches apart, and each of them has the oracle's advantages."""
    assert not any(row["is_padding"] for row in rows)
    assert len(rows) == count * MINI_BATCH * SAMPLES
    groups = {batch: set() for batch in {row["batch"] for row in rows}}
    for row in rows:
        groups[row["batch"]].add(row["group"])
    assert [*map(len, groups.values())] == [MINI_BATCH] * count
    distances = [difference(rows, of_batch, **options) for of_batch in groups.values()]
    print("largest difference to the oracle", max(distances))
    assert max(distances) < tolerance
    trained = [row for row in rows if row["trained_tokens"]]
    assert sum(abs(row["advantage"]) > 0.01 for row in trained) > len(trained) / 2


def test_separate_async(assets, tmp_path):
    """Two ranks, two mini-batches a step; responses go on under new weights; some are rejected."""
    run = train(
        tmp_path,
        overrides(
            assets,
            *documented("verl.trainer.main_ppo"),
            *TRAINING,
            "trainer.v1.separate_async.parameter_sync_step=2",
            f"data.train_batch_size={2 * MINI_BATCH}",
            "data.max_response_length=300",
            "actor_rollout_ref.rollout.max_num_seqs=4",  # at a time, so that some are under way
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=3",
            *REJECTION,
            scorer="fails_for_one_row",
        ),
    )
    spans, rejected = [], []
    for step, metrics in run.steps().items():
        rows = run.dump(step)
        check_mini_batches(rows, 2)
        spans.append(metrics["training/off_policy/trajectory_spans/max"])
        rejected.append(sum(row["trained_tokens"] == 0 for row in rows))
        if metrics["training/off_policy/trajectory_staleness_worst/max"] == 0:
            # for the second mini-batch too: verl goes back to the weights of the step's start
            assert metrics["training/rollout_probs_diff_max"] < 1e-5
    print("versions in a response", spans, "rejected", rejected)
    assert rejected[0] == 0 < max(rejected) < len(rows)
    assert spans[0] == 1 < max(spans)
    check_error(run, BAD_ROW)


def test_one_step_off_policy(assets, tmp_path):
    main = "verl.experimental.one_step_off_policy.main_ppo"
    run = train(
        tmp_path,
        overrides(
            assets,
            *documented(main),
            *TRAINING,
            f"data.train_batch_size={MINI_BATCH}",
            "data.max_response_length=100",
            "ray_kwargs.ray_init.num_gpus=2",
            *REJECTION,
            scorer="fails_for_one_row",
        ),
        main=main,
    )
    rejected = []
    for step in run.steps():
        rows = run.dump(step)
        check_mini_batches(rows, 1)
        rejected.append(sum(row["trained_tokens"] == 0 for row in rows))
    print("rejected", rejected)
    assert 0 < max(rejected) < len(rows)
    check_error(run, BAD_ROW)


def test_fully_async_policy(assets, tmp_path):
    main = "verl.experimental.fully_async_policy.fully_async_main"
    run = train(
        tmp_path,
        overrides(
            assets,
            *documented(main),
            *TRAINING,
            # rollouts are slower than training, so that some are under way when weights come; those
            # that were go on behind all others, so few may wait
            "data.max_response_length=400",
            "actor_rollout_ref.rollout.max_num_seqs=2",
            "++async_training.trigger_parameter_sync_step=1",
            "ray_kwargs.ray_init.num_gpus=2",
            "ray_kwargs.ray_init.num_cpus=40",  # logical ones: trainer and rollouter want 10 each
            scorer="fails_for_one_row",
        ),
        main=main,
    )
    dumps = sorted((run.folder / "rollouts").iterdir())
    for file in dumps:
        check_mini_batches(run.dump(file.stem), 1)
    check_error(run, BAD_ROW)
    parts = [m.get("fully_async/partial/max_partial_span", 0) for m in run.steps().values()]
    print("versions more than one in a response", parts, "dumps", len(dumps))
    assert len(dumps) >= 4
    assert max(parts) >= 1


LEGACY_STEPS = 4


@pytest.mark.parametrize(
    ("estimator", "tolerance", "options"),
    [("gdpo", 1e-5, {}), ("grpo", 1e-4, GRPO)],  # verl's own grpo is in float32
)
def test_legacy(assets, tmp_path, estimator, tolerance, options):
    """verl's trainer before 0.9: two mini-batches a step, of one batch of advantages."""
    run = train(
        tmp_path,
        overrides(
            assets,
            *TRAINING,
            "trainer.use_v1=False",
            f"estimator={estimator}",
            f"data.train_batch_size={MINI_BATCH}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH // 2}",
            "data.max_response_length=100",
            f"trainer.total_training_steps={LEGACY_STEPS}",
        ),
    )
    assert run.exit_code == 0, run.last_lines()
    steps = run.steps()
    assert [*steps] == [*range(1, LEGACY_STEPS + 1)]
    for step, metrics in steps.items():
        rows = run.dump(step)
        check_mini_batches(rows, 1, tolerance, **options)
        for name in WEIGHTS:
            values = [row["rewards"][name] for row in rows]
            assert metrics[f"gdpo/{name}/mean"] == pytest.approx(sum(values) / len(values))
        assert metrics["training/rollout_probs_diff_max"] < 1e-5  # the rollout has the weights
        assert 0 < metrics["actor/grad_norm"] < float("inf")
        # test_freq is 2
        assert any("letters" in name for name in metrics if name.startswith("val-")) == (
            step % 2 == 0
        )


# --- the default trainer: tools, ranks, losses ----------------------------------------------------


def with_one_tool(file):
    """Let each row have the first of its tools alone; returns the names of all."""
    table = pd.read_parquet(file)
    tools = [re.findall(r"^(\w+) {", prompt[0]["content"], re.M) for prompt in table["prompt"]]
    table["extra_info"] = [
        {**info, "tool_selection": names[:1]}
        for info, names in zip(table["extra_info"], tools, strict=True)
    ]
    table.to_parquet(file)
    return {name for names in tools for name in names}


def test_tools_for_several_turns(tmp_path):
    """A policy that calls tools, some of which fail; odd sessions have two outputs."""
    rows = tmp_path / "rows"
    command = ("data", "tool_rl", "--synthetic", "64", "--out", str(rows))
    subprocess.run([sys.executable, "-m", "verl_gdpo", *command], check=True, timeout=300)
    names = {name for file in rows.glob("*.parquet") for name in with_one_tool(file)}
    (tmp_path / "tools.json").write_text(tool_loop.tools_config(sorted(names)))
    (tmp_path / "loops.yaml").write_text(tool_loop.LOOPS)
    agent, turns = (f"actor_rollout_ref.rollout.{name}" for name in ("agent", "multi_turn"))
    run = train(
        tmp_path / "run",
        [
            *overrides(rows, f"actor_rollout_ref.model.path={POLICY}"),
            f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml",
            f"{agent}.default_agent_loop=tools_twice",
            f"{turns}.enable=True",
            f"{turns}.format=parameters",
            f"{turns}.tool_config_path={tmp_path}/tools.json",
            f"{turns}.max_assistant_turns=3",
            f"{turns}.max_parallel_calls=2",
            "data.max_prompt_length=80",
            "data.max_response_length=160",
            "trainer.val_before_train=False",
            "trainer.total_training_steps=2",
        ],
        PYTHONPATH=os.pathsep.join([str(HELP), os.environ.get("PYTHONPATH", "")]),
    )
    assert run.exit_code == 0, run.last_lines()
    texts, outside, most = "", 0, []
    for step, metrics in run.steps().items():
        if step == 0:
            continue
        rows_of_step = run.dump(step)
        check_rollouts(rows_of_step, WEIGHTS)
        texts += "".join(row["output"] for row in rows_of_step)
        for row in rows_of_step:
            # what a tool has said is in the response, and the loss leaves it out
            has_said = "\ntool\n" in row["output"]
            assert row["is_padding"] or has_said == (row["trained_tokens"] < row["response_tokens"])
            outside += has_said
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        most.append(metrics["training/num_turns/max"])
    counts = {text: texts.count(text) for text in SAID}
    print("rows with an answer", outside, counts, "turns", most)
    assert max(most) > 4  # prompt, call, answer, and again
    assert min(counts.values()) > 0


def two_steps(assets, folder, *more, most=1e-5):
    run = train(folder, overrides(assets, "trainer.total_training_steps=2", *more))
    assert run.exit_code == 0, run.last_lines()
    for step in (1, 2):
        check_rollouts(run.dump(step), WEIGHTS)
        metrics = run.steps()[step]
        assert metrics["training/rollout_probs_diff_max"] < most  # the rollout has the weights
        assert 0 < metrics["actor/grad_norm"] < float("inf")
        print(step, {name: metrics[name] for name in metrics if name.startswith("actor/")})
    return run.steps()[2]


def test_four_ranks_with_kl_in_the_loss_and_clip_higher(assets, tmp_path):
    """24 rows and mini-batches of 16, on 4 ranks."""
    actor = "actor_rollout_ref.actor"
    metrics = two_steps(
        assets,
        tmp_path,
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_gpus=4",
        f"{actor}.use_kl_loss=True",
        f"{actor}.kl_loss_coef=0.01",
        f"{actor}.clip_ratio_low=0.1",
        f"{actor}.clip_ratio_high=0.3",
        f"{actor}.loss_agg_mode=seq-mean-token-sum",
    )
    assert metrics["actor/kl_loss"] > 0


def test_gspo_with_lora(assets, tmp_path):
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    two_steps(
        assets,
        tmp_path,
        f"{actor}.policy_loss.loss_mode=gspo",
        f"{actor}.loss_agg_mode=seq-mean-token-mean",
        f"{model}.lora_rank=8",
        f"{model}.lora.merge=True",
        most=5e-4,  # verl sends what it has merged in bfloat16
    )
