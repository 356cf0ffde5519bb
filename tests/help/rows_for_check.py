"""The rows and reward functions on which `verl-gdpo check` is tested, right and wrong ones."""

import json
import shlex
import shutil

import pandas as pd
import pyarrow.parquet
from byte_tokenizer import make_tokenizer
from repository import REPO
from saved_checkpoint import save_checkpoint
from tool_rows import tool_row

# in which nothing is wrong
COMMAND = """
--elsewhere
algorithm.adv_estimator=gdpo reward.reward_manager.name=gdpo
data.train_files=DATA/train.parquet data.val_files=DATA/test.parquet
data.train_batch_size=6 data.filter_overlong_prompts=True
actor_rollout_ref.model.path=org/model
actor_rollout_ref.actor.ppo_mini_batch_size=6 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
trainer.n_gpus_per_node=1 trainer.logger=console
"""

REWARDS = """
import asyncio, os, sys, threading, time

def lengths(data_source, solution_str, ground_truth, extra_info):
    short = 1.0 if len(solution_str) < 20 else 0.0
    return {"short": short, "row": extra_info["index"], "flat": 2.0}

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)

def splits(data_source, solution_str, ground_truth, extra_info):
    return {"tools": solution_str.split("<tool_call>")[1].count("city") * 1.0}  # bad on ""

def fails_in_two_ways(solution_str, **_):
    if not solution_str:
        raise KeyError("empty")
    return {"a": float("nan") if solution_str == "?" * 8 else 1.0}

def text_beside(solution_str, ground_truth, **_):
    return {"right": float(solution_str == ground_truth), "style": "1.0"}

def three(solution_str, ground_truth, **_):
    right = float(solution_str == ground_truth)
    return {"right": right, "short": float(len(solution_str) < 20), "length": len(solution_str)}

def nothing(**_):
    return None

def not_a_number(data_source, solution_str, ground_truth, extra_info):
    return {"a": 1.0, "b": float("nan") if solution_str == "" else 0.5}

def unlike(data_source, solution_str, ground_truth, extra_info):
    return {"a": 1.0, "b": 1.0} if solution_str else {"a": 0.0}

def scored(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "length": len(solution_str)}

def bare_nan(**_):
    return float("nan")

def long_and_short(data_source, solution_str, ground_truth, extra_info):
    words, tokens = len(solution_str.split()), extra_info["response_tokens"]
    return {
        "words_500": float(words > 500),
        "characters_30": float(len(solution_str) <= 30),
        "characters_5000": float(len(solution_str) <= 5000),
        "tokens_20": float(tokens <= 20),
        "tokens_2000": float(tokens <= 2000),
        "tokens": tokens,
    }

def prints(solution_str, **_):
    print("noise of Python", file=sys.__stdout__)  # past pytest
    os.write(2, b"noise of the system\\n")
    return float(solution_str == "")

def leaves(**_):
    raise SystemExit(0)

def hangs(**_):
    time.sleep(2)

async def blocks(**_):
    time.sleep(2)

def sleeps(**_):
    print("noise")
    time.sleep(1000)

def never_right(**_):
    return 0.0

def asks_a_judge(**_):
    return float(os.environ["KEY_OF_A_JUDGE"])

seven = threading.Barrier(7)

def slow_judge(solution_str, ground_truth, **_):
    seven.wait(60)  # until seven are here
    return float(solution_str == ground_truth)

async def hangs_on_empty(solution_str, ground_truth, **_):
    if not solution_str:
        await asyncio.sleep(1000)
    return float(solution_str == ground_truth)

def ranks(solution_strs, **_):
    return [float(len(text) == min(map(len, solution_strs))) for text in solution_strs]

def asks_a_reward_model(reward_router_address, **_):
    raise ConnectionError(reward_router_address)
"""


# a file that reads a variable of the environment while it is loaded
KEYLESS = """
import os
KEY = os.environ["KEY_OF_A_JUDGE"]
"""

# {name of a reward file: how it ends the process that imports it}
ENDS = {
    "exits": "import sys\nsys.exit(1)\n",
    "interrupts": "\nraise KeyboardInterrupt\n",
    "dies": "import os\nos._exit(3)\n",
}

POSITIONS = 1024
# config.json of a small model, which transformers and verl take
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": POSITIONS,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


# a file of agent loops
LOOPS = """
- name: react_agent
  _target_: verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop
"""


def arguments_of(line, data):
    return shlex.split(line.replace("DATA", str(data)))


def messages_of(printed):
    """The problems that `verl-gdpo check` says, each in one line."""
    told = printed.rpartition("\nverl-gdpo check: ")[0].split("verl-gdpo check: problem: ")
    return [" ".join(text.split()) for text in told if text]


def write_check_data(folder):
    def write(name, rows):
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")

    rows = [tool_row(i, "train") for i in range(6)]
    for name in ("good", "train", "test"):
        write(name, rows)
    math = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}}
    write("mixed", [rows[0], {**rows[1], **math}, *rows[2:]])
    write("math", [{**row, **math} for row in rows])
    write("nowhere", [{**row, "data_source": "nowhere"} for row in rows])
    write("no_source", [*rows[:2], {**rows[2], "data_source": None}, *rows[3:]])
    write("no_split", [{**row, "extra_info": {"index": i}} for i, row in enumerate(rows)])
    write("columns", [{"prompt": "x"}])
    write("no_truth", [{**row, "reward_model": {"ground_truth": [1]}} for row in rows])
    write("text", [{**row, "reward_model": "gold"} for row in rows])
    write("text_info", [{**row, "extra_info": json.dumps(row["extra_info"])} for row in rows])
    write("session", [{**row, "session_id": f"s{i}"} for i, row in enumerate(rows)])
    write("reference", [{**row, "responses": ["72"]} for row in rows])
    write("validated", [{**row, "validate": True} for row in rows])
    write("tools_outside", [{**row, "tools_kwargs": {"weather": {"a": 1}}} for row in rows])
    selection = {"tool_selection": "weather"}
    write("letters", [{**row, "extra_info": {**row["extra_info"], **selection}} for row in rows])
    write("agents", [{**row, "agent_name": "tool_agent"} for row in rows])
    write("react", [*rows[:1], *({**row, "agent_name": "react_agent"} for row in rows[1:])])
    for name, prompt in odd_prompts(rows[0]).items():
        write(name, [{**rows[0], "prompt": prompt}, *rows[1:]])
    write("pictures", [{**row, "images": ["a.png"]} for row in rows])
    write("shown", [{**row, "prompt": shown(row["prompt"]), "images": ["a.png"]} for row in rows])
    (folder / "react.yaml").write_text(LOOPS)
    write("text_prompts", [{**row, "prompt": "Weather in Oslo?"} for row in rows])
    write("same", [{**row, "prompt": rows[0]["prompt"]} for row in rows])
    write(
        "silent",
        [*({**row, "prompt": [{"role": "user", "content": ""}]} for row in rows[:2]), *rows[2:]],
    )
    write(
        "half", [*rows[:3], *({**row, "reward_model": {"ground_truth": None}} for row in rows[3:])]
    )
    write("numbers", [{**row, **math, "data_source": "mine"} for row in rows])
    (folder / "answers.jsonl").write_text(
        "\n".join(f'{{"response": "{{\\"result\\": {n}}}", "row": {n % 2}}}' for n in (72, 17))
    )
    shutil.copy(REPO / "tests" / "help" / "mistaken_rewards.py", folder / "mistakes.py")
    write("bad", [*rows[:2], with_a_bad_truth(rows[2]), *rows[3:]])
    pyarrow.parquet.write_table(
        pyarrow.parquet.read_table(folder / "good.parquet").slice(0, 0), folder / "empty.parquet"
    )
    lines = [json.dumps(tool_row(i, "train")) for i in range(6)]
    (folder / "good.jsonl").write_text("\n".join(lines))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "keyless.py").write_text(KEYLESS)
    for name, code in ENDS.items():
        (folder / f"{name}.py").write_text(code)
    for name, template in {"model": TEMPLATE, "base_model": None}.items():
        write_model_without_weights(folder / name, template)
    (folder / "broken.py").write_text("import no_such_module\n")
    save_checkpoint(folder / "finished", 30)


def odd_prompts(row):
    """{name of a file: a prompt that is rarely meant}."""
    answer = {"role": "assistant", "content": row["reward_model"]["ground_truth"]}
    question = row["prompt"][1]["content"]
    marked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return {
        "answered": [*row["prompt"], answer],
        "templated": [row["prompt"][0], {"role": "user", "content": marked}],
        "null_content": [row["prompt"][0], {"role": "user", "content": None}],
    }


def shown(prompt):
    """A prompt with a place for a picture."""
    system, user = prompt
    return [system, {**user, "content": f"<image>{user['content']}"}]


def with_a_bad_truth(row):
    truth = "<tool_call>\nnot json\n</tool_call>"
    return {**row, "reward_model": {**row["reward_model"], "ground_truth": truth}}


def write_model_without_weights(folder, chat_template):
    """The files of a model that say how long a text may be, and how it becomes tokens."""
    make_tokenizer(folder, chat_template)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
