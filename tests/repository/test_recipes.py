"""Every recipe composes on verl's own configuration and passes verl's validation and ours."""

import re
import shlex
import shutil
from dataclasses import replace

import pytest
from composed_recipes import RECIPES, composed, flat
from omegaconf import OmegaConf
from quick_composition import compose_quickly as compose_config
from repository import tracked_files
from transformers import AutoTokenizer
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_gdpo.algorithm.settings import DIALECTS, GdpoSettings
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.hooks.unread_keys import UnreadKeys, find_unread_keys
from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.tool_rl.rows import make_rows
from workshop.benchmarks.step_model import TOOL_RL

TOOL_RL_POLICY = RECIPES.parent / "verl_gdpo" / "cpu" / "tool_rl_policy"
ESTIMATORS = {  # what some arms are
    "gdpo": ("gdpo", GdpoSettings()),
    "gdpo_token": ("gdpo", GdpoSettings(batch_norm="token")),
    "gdpo_no_batch_norm": ("gdpo", GdpoSettings(batch_norm="none")),
    "grpo": ("grpo", GdpoSettings()),
    "grpo_no_std": ("grpo", GdpoSettings(normalize_by_std=False)),
    "grpo_batch_norm": ("gdpo", GdpoSettings(group_norm="summed")),
}


def names(group):
    return sorted(path.stem for path in tracked_files() if path.parts[:2] == ("recipes", group))


def test_one_seed_for_all():
    found = flat(composed("seed=7"))
    keys = (
        "data.seed",
        "actor_rollout_ref.actor.data_loader_seed",
        "actor_rollout_ref.rollout.seed",
    )
    assert [found[key] for key in keys] == [7, 7, 7]


def pairs():
    """(task, hardware, estimator), so that any two of them come together at least once."""
    hardware = names("hardware")
    assert len(names("task")) >= len(hardware) <= len(names("estimator"))
    for i, task in enumerate(names("task")):
        for k, estimator in enumerate(names("estimator")):
            # by default, each file of the recipes at least once
            marks = () if i == 0 or k == 0 else pytest.mark.slow
            yield pytest.param(task, hardware[(i + k) % len(hardware)], estimator, marks=marks)


@pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning")
@pytest.mark.parametrize(("task", "hardware", "estimator"), [*pairs()])
def test_every_pair_is_valid(task, hardware, estimator):
    config = composed(f"task={task}", f"hardware={hardware}", f"estimator={estimator}")
    assert find_unread_keys(config) == UnreadKeys()
    validate_config(config, need_reference_policy(config), need_critic(config))
    settings = settings_of_run(config, TASKS[task].data_sources)
    assert settings.bounds.items() >= TASKS[task].bounds().items()
    found = (config.algorithm.adv_estimator, replace(settings, bounds={}))
    assert found == ESTIMATORS.get(estimator, found)
    assert not need_critic(config)


ESTIMATOR_KEYS = {
    "arm",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.gdpo.group_norm",
    "algorithm.gdpo.batch_norm",
}


@pytest.mark.parametrize("estimator", names("estimator"))
def test_the_arms_differ_in_the_estimator_alone(estimator):
    arm, gdpo = (
        flat(composed("task=tool_rl", "hardware=8gpu", f"estimator={name}"))
        for name in (estimator, "gdpo")
    )
    differing = {key for key in {*arm, *gdpo} if arm.get(key) != gdpo.get(key)}
    named_after_it = {key for key in differing if key.endswith(".experiment_name")}
    assert differing - named_after_it <= ESTIMATOR_KEYS
    assert arm["trainer.experiment_name"] == f"tool_rl-{estimator}"


def test_a_recipe_of_another_task_trains_on_that_task(tmp_path):
    """On each hardware, data, lengths and model are those that the task names."""
    shutil.copytree(RECIPES, tmp_path / "recipes")
    own = {
        **{"data.train_files": "mine.parquet", "data.val_files": "mine_too.parquet"},
        "data.train_batch_size": 7,
        "data.max_prompt_length": 11,
        "data.max_response_length": 13,
        "actor_rollout_ref.model.path": "org/mine",
        "actor_rollout_ref.actor.optim.lr": 1.0,
        "trainer.total_training_steps": 17,
    }
    recipe = OmegaConf.from_dotlist([f"{key}={value}" for key, value in own.items()])
    text = f"# @package _global_\n{OmegaConf.to_yaml(recipe)}"
    (tmp_path / "recipes" / "task" / "mine.yaml").write_text(text)
    for hardware in names("hardware"):
        overrides = ["task=mine", f"hardware={hardware}"]
        found = flat(compose_config(tmp_path / "recipes", "train", overrides))
        assert {key: found[key] for key in own} == own


def test_the_table_of_estimators():
    text = (RECIPES / "README.md").read_text().split("## Estimators")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == {*names("estimator")}


QWEN, DEEPSEEK = "Qwen/Qwen2.5-1.5B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen"
LONG = {
    **{"sizes": (512, 16, 64), "lengths": (1024, 8000), "lr": 1e-6, "clip": (0.2, 0.28)},
    **{"kl": (0.0005, "mse"), "filters": True},
}
PAPER = {  # prompts, samples and mini-batch; lengths of prompt and response; steps, or rows
    "tool_rl": {
        **{"sizes": (512, 4, 128), "lengths": (2048, 1024), "lr": 1e-6, "clip": (0.2, 0.2)},
        **{"model": QWEN, "rows": 3920, "steps": 105},
    },
    "gsm8k": {
        **{"sizes": (32, 16, 32), "lengths": (512, 1024), "lr": 5e-6, "clip": (0.2, 0.2)},
        **{"model": QWEN, "rows": 7473, "steps": 233, "kl": (0.04, "low_var_kl")},
    },
    "math_length": {**LONG, "model": f"{DEEPSEEK}-1.5B", "steps": 500},
    "coding": {**LONG, "model": f"{DEEPSEEK}-7B", "steps": 400},
}


@pytest.mark.parametrize(
    ("task", "hardware"), [("tool_rl", "1gpu"), *((task, "8gpu") for task in PAPER)]
)
def test_the_papers_settings(task, hardware):
    config, paper = composed(f"task={task}", f"hardware={hardware}"), PAPER[task]
    actor, rollout, data = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.data,
    )
    assert config.actor_rollout_ref.model.path == paper["model"]
    sizes = (data.train_batch_size, rollout.n, actor.ppo_mini_batch_size)
    assert sizes == paper["sizes"]
    assert (data.max_prompt_length, data.max_response_length) == paper["lengths"]
    clip = (actor.clip_ratio_low or actor.clip_ratio, actor.clip_ratio_high or actor.clip_ratio)
    assert (actor.optim.lr, clip) == (paper["lr"], paper["clip"])
    steps = config.trainer.total_training_steps
    if "rows" in paper:
        steps = paper["rows"] // data.train_batch_size * config.trainer.total_epochs
    assert steps == paper["steps"]
    kl = (actor.kl_loss_coef, actor.kl_loss_type)
    assert actor.use_kl_loss and kl == paper.get("kl", kl)
    assert config.algorithm.filter_groups.enable == paper.get("filters", False)


def test_more_of_the_papers_settings():
    optim = composed("task=gsm8k", "hardware=8gpu").actor_rollout_ref.actor.optim
    assert (optim.lr_scheduler_type, optim.lr_warmup_steps_ratio) == ("cosine", 0.1)
    config = composed("task=tool_rl", "hardware=8gpu")
    assert config.data.filter_overlong_prompts and not config.algorithm.use_kl_in_reward
    assert composed("task=coding", "hardware=8gpu").reward.reward_kwargs.limit_tokens == 4000
    paper = PAPER["tool_rl"]
    assert paper["sizes"][:2] == (TOOL_RL.prompts, TOOL_RL.samples)
    longest_prompt, longest_response = paper["lengths"]
    assert TOOL_RL.prompt_tokens < longest_prompt
    assert TOOL_RL.longest_response == longest_response


def test_length_for_right_answers_alone_is_set_as_the_recipe_says():
    said = {
        override
        for name in ("README.md", "task/math_length.yaml")
        for override in re.findall(
            r"'(\+\+algorithm.gdpo.rewards=.*length.*correctness.*)'", (RECIPES / name).read_text()
        )
    }
    (override,) = said
    settings = settings_of_run(composed("task=math_length", override), ["verl_gdpo/math_length"])
    right, wrong = ({"correctness": right, "length": 1.0} for right in (1.0, 0.0))
    assert settings.terms.gate(right) == right
    assert settings.terms.gate(wrong) == {"correctness": 0.0, "length": 0.0}


@pytest.mark.parametrize("task", names("task"))
def test_what_verl_sets_where_the_recipes_say_nothing(task):
    """The tables compare it with the authors' scripts."""
    config = composed(f"task={task}", "hardware=8gpu")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.entropy_coeff, actor.clip_ratio_c, actor.loss_agg_mode) == (0, 3.0, "token-mean")
    assert (actor.optim.optimizer, actor.optim.weight_decay) == ("AdamW", 0.01)
    assert actor.grad_clip == actor.optim.clip_grad == 1.0
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1, -1)
    assert not rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0


def authors_commands():
    section = (RECIPES / "README.md").read_text().split("## The paper's settings, and ours")[1]
    (block,) = re.findall(r"```bash\n(.*?)```", section.split("\n## ")[0], re.S)
    for command in block.replace("\\\n", "").splitlines():
        script, *overrides = shlex.split(command)
        assert script == "./run_tool_rl.sh"
        yield overrides


def test_what_the_authors_script_sets():
    builtin = replace(GdpoSettings(), **DIALECTS["verl_builtin"])
    in_both = {
        "actor_rollout_ref.actor.entropy_coeff": 0.001,
        "actor_rollout_ref.actor.use_kl_loss": False,
    }
    expected = {
        "gdpo": (builtin, {**in_both, "algorithm.gdpo.dialect": "verl_builtin"}),
        "grpo": (GdpoSettings(), {**in_both, "algorithm.use_kl_in_reward": True}),
    }
    for hardware, overrides in [(h, o) for h in ("8gpu", "cpu") for o in authors_commands()]:
        config = composed(f"hardware={hardware}", *overrides)
        validate_config(config, need_reference_policy(config), need_critic(config))
        settings, changed = expected[config.algorithm.adv_estimator]
        assert replace(settings_of_run(config, ["rlla"]), bounds={}) == settings
        recipe = flat(composed(f"hardware={hardware}", f"estimator={config.arm}"))
        found = flat(config)
        assert {key: found[key] for key in found if found[key] != recipe.get(key)} == changed
        assert config.algorithm.kl_ctrl.kl_coef == 0.001


def test_scripts_hold_no_hyperparameter():
    script = (RECIPES.parent / "run.sh").read_text()
    code = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    assert re.findall(r"[a-z_]+\.[\w.]+=\d\S*|--\S+[ =]\d+(?!>)\b", code) == []


# verl's own examples have some of it (examples/gdpo_trainer, examples/fapo_trainer);
# `hardware/8gpu.yaml` and `attention/auto.yaml` say why the rest differs
ENGINE = {
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.use_fused_kernels": True,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}


@pytest.mark.parametrize("task", ["tool_rl", "math_length", "coding"])
def test_the_engine_of_eight_gpus(task):
    assert flat(composed(f"task={task}", "hardware=8gpu")).items() >= ENGINE.items()


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("auto", "auto"),
        ("flash_attn", "flash_attention_2"),
        ("sdpa", "packed_sdpa"),
    ],
)
def test_ways_to_attend_differ_in_it_alone(name, chosen):
    base, ours = (
        flat(composed("hardware=8gpu")),
        flat(composed("hardware=8gpu", f"attention={name}")),
    )
    attention = "actor_rollout_ref.model.override_config.attn_implementation"
    assert {**base, attention: chosen} == ours


def test_a_run_of_several_tasks_keeps_the_prompts_of_each():
    page = (RECIPES / "README.md").read_text()
    block = page.split("## Several tasks in one run")[1].split("```bash\n")[1].split("```")[0]
    overrides = [word for word in shlex.split(block) if "=" in word]
    config = composed(*overrides)
    for path in config.data.train_files:
        task = path.split("/")[1]
        assert config.data.max_prompt_length >= composed(f"task={task}").data.max_prompt_length


def test_the_longest_generated_row_of_tool_rl_is_as_its_recipe_says():
    recipe = (RECIPES / "task_on_hardware" / "tool_rl-cpu.yaml").read_text()
    said = re.search(r"longest generated prompt has (\d+) tokens, the longest answer (\d+)", recipe)
    assert said
    tokenizer = AutoTokenizer.from_pretrained(TOOL_RL_POLICY)
    prompts, answers = [], []
    for row in make_rows(2000, split="train", seed=0):
        text = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )
        prompts.append(len(tokenizer(text)["input_ids"]))
        answer = row["reward_model"]["ground_truth"] + tokenizer.eos_token
        answers.append(len(tokenizer(answer)["input_ids"]))
    assert [max(prompts), max(answers)] == [int(number) for number in said.groups()]
