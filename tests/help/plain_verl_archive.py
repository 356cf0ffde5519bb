"""What a plain verl command leaves: verl's own configuration and GRPO, no recipe and no verl-gdpo.

`python tests/help/plain_verl_archive.py FOLDER` trains for three minutes without a GPU, and packs
the run into plain_verl_archive.tar.gz beside this file: its metrics in two trackers, two of its
dumps, Hydra's folder and the reward function. The tests read that archive.
"""

import shutil
import sys
import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).with_name("plain_verl_archive.tar.gz")
METRICS = "plain/grpo_baseline.jsonl"
TENSORBOARD = "tensorboard_log/plain/grpo_baseline"
CONFIG = "outputs"
DUMPS = "dumps"
SCORER = "my_rewards.py:compute_score"

# 24 prompts x 8 samples in mini-batches of 16 x 8: verl pads 192 rows to 256
OVERRIDES = """
algorithm.adv_estimator=grpo data.train_files=data/train.parquet data.val_files=data/test.parquet
data.val_max_samples=40 data.train_batch_size=24 data.max_prompt_length=80
data.max_response_length=56 actor_rollout_ref.model.path=policy actor_rollout_ref.rollout.n=8
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.optim.lr=3e-4
reward.custom_reward_function.path=my_rewards.py trainer.project_name=plain
trainer.experiment_name=grpo_baseline trainer.logger=[console,file,tensorboard]
trainer.rollout_data_dir=dumps trainer.total_training_steps=10 trainer.test_freq=5
trainer.save_freq=-1
"""
WITHOUT_A_GPU = """
data.dataloader_num_workers=0 trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1
actor_rollout_ref.model.use_remove_padding=false actor_rollout_ref.model.use_fused_kernels=true
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.enable_gradient_checkpointing=false actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.actor.use_dynamic_bsz=true
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32
actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
transfer_queue.backend.SimpleStorage.total_storage_size=10000 ray_kwargs.ray_init.num_cpus=16
+ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=false
+ray_kwargs.ray_init.object_store_memory=500000000
"""
REWARDS = '''\
"""A reward function as a user of verl writes it: one score for training, its parts to look at."""

import json
import re

LAYOUT = re.compile(r"<think>.*?</think>\\n<tool_call>\\n.*?\\n</tool_call>", re.S)


def calls_of(text):
    block = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
    calls = []
    for line in block.strip().splitlines():
        try:
            calls.append(json.loads(line))
        except ValueError:
            return None
    return calls


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    expected, got = calls_of(ground_truth), calls_of(solution_str)
    correct = 0.0
    if got and expected:
        same = sum(call in expected for call in got)
        correct = 2.0 * same / max(len(got), len(expected))
    layout = float(LAYOUT.fullmatch(solution_str.strip()) is not None)
    return {"score": layout + correct, "layout": layout, "correct": correct}
'''


def unpack(folder):
    """The run as it was, in `folder`."""
    with tarfile.open(ARCHIVE) as archive:
        # as an attribute it harms no Python that lacks filters, such as 3.11.2
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder


def train(folder):
    from ray_session import ray_folder
    from start_verl import ENVIRONMENT

    from verl_gdpo.run.launch import launch
    from verl_gdpo.tools.data import main as make_data
    from workshop.tiny_policy.train import SHIPPED

    folder.mkdir(parents=True)
    (folder / "my_rewards.py").write_text(REWARDS)
    shutil.copytree(SHIPPED, folder / "policy")
    make_data(["tool_rl", "--synthetic", "--out", str(folder / "data")])
    with ray_folder() as ray:
        verl = [sys.executable, "-m", "verl.trainer.main_ppo", *(OVERRIDES + WITHOUT_A_GPU).split()]
        command = ["env", "-C", str(folder), "-u", "VERL_FILE_LOGGER_PATH", *verl]
        env = {**ENVIRONMENT, "VERL_USE_EXTERNAL_PLUGINS": "verl_gdpo_cpu"}
        temp_dir = f"+ray_kwargs.ray_init._temp_dir={ray}"
        end = launch([*command, temp_dir], folder / "launcher", env=env, time_limit=540)
        return end.exit_code


def pack(folder):
    (hydra,) = folder.glob("outputs/*/*/.hydra/config.yaml")
    (events,) = (folder / TENSORBOARD).iterdir()
    files = [folder / "my_rewards.py", folder / METRICS, events, hydra]
    files += [folder / DUMPS / f"{step}.jsonl" for step in (1, 10)]

    def nobody(info):
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(ARCHIVE, "w:gz") as archive:
        for file in files:
            archive.add(file, file.relative_to(folder), filter=nobody)


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    if code := train(where):
        sys.exit(code)
    pack(where)
