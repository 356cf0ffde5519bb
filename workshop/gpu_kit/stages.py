"""What the kit runs on the machine: the stages, the most valuable first.

A training is verl's own `main_ppo` with our recipe for one GPU. With `device="cpu"` everything is
tiny: that shows that the stages work, and measures nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from verl_gdpo.tools.run.resume import quoted

REPO = Path(__file__).resolve().parents[2]
TESTS = (
    "core/algorithm/test_advantage.py",
    "core/algorithm/test_equation.py",
    "core/algorithm/test_metrics.py",
    "core/algorithm/test_values.py",
    "core/algorithm/test_variants.py",
    "core/hooks/test_estimator.py",
    "core/hooks/test_replay_buffer.py",
    "tools/run/test_attention.py",
)
HF = "workshop.gpu_kit.hf_rollout"
MADE = "workshop.gpu_kit.made_rollout"
# of the paper's 512: four times as many prompts take four times as long
PROMPTS_OF_D = 128
# limits are for a GPU's machine; the start of verl alone takes minutes on two busy cores
LIMIT_TIMES_ON_CPU = 4


@dataclass(frozen=True)
class Place:
    """A machine, and where the stages find and leave things."""

    device: Literal["cpu", "cuda"]
    python: str
    data: Path  # rows and the tiny policy, as packed
    work: Path  # each stage has a folder in it
    fitting: Sequence[str] = ()  # what `verl_gdpo.tools.run.gpus` says of the GPUs


@dataclass(frozen=True)
class Stage:
    """`command` runs in the repository, with `env` added; it ends at its limit at the latest.

    Attributes:
        steps: of a training, which must all be there.
        needs: a module without which the stage is left out.
        needs_gpu: nothing of the stage can be tried on a CPU.
        after: a stage of which this one uses what it made.
        rollout_is_the_actor: the log-probabilities of both must agree.
    """

    name: str
    what: str
    limit_s: int
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    needs: str = ""
    needs_gpu: bool = False
    after: str = ""
    rollout_is_the_actor: bool = False


def stages(place: Place) -> list[Stage]:
    """All of them, in the order in which they run."""
    every = [
        *_tests_and_benchmarks(place),
        _tiny_policy(place),
        _vllm(place),
        *_wide_model(place),
        # ten minutes and ten gigabytes, and nothing of it on the GPU
        _benchmark(place, "a_step", "a step with and without verl-gdpo, no model", 600, "step"),
    ]
    times = LIMIT_TIMES_ON_CPU if place.device == "cpu" else 1
    return [replace(stage, limit_s=times * stage.limit_s) for stage in every]


def _tests_and_benchmarks(place: Place) -> list[Stage]:
    files = [f"tests/{name}" for name in TESTS[: 1 if place.device == "cpu" else None]]
    # a machine's own packages may warn, which our tests take for errors
    options = ("-q", "-p", "no:cacheprovider", "-W", "ignore")
    tests = (place.python, "-m", "pytest", *options, *files)
    names = ("scoring",) if place.device == "cpu" else ("estimator", "scoring")
    return [
        Stage("a_tests", "tests of the estimator, on the device too", 240, tests),
        _benchmark(place, "a_benchmarks", "estimator and scorer beside verl's", 240, *names),
    ]


def _benchmark(place: Place, name: str, what: str, limit_s: int, *names: str) -> Stage:
    file = str(place.work / name / "rows.jsonl")
    measured = (*names, "--device", place.device, "--json", file)
    command = (place.python, "-m", "workshop.benchmarks", *measured)
    return Stage(name, what, limit_s, command)


def _tiny_policy(place: Place) -> Stage:
    """The tiny policy, whose responses transformers samples on the CPU."""
    rollout = ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.dtype=float32")
    tiny = ("task_on_hardware=tool_rl-cpu", *rollout, "trainer.total_training_steps=3")
    env = {} if place.device == "cpu" else {"VERL_USE_EXTERNAL_MODULES": HF}
    command = _training(place, "b", *tiny)
    what = "gdpo, 1-GPU recipe, tiny policy"
    return Stage("b", what, 240, command, env, 3, rollout_is_the_actor=True)


def _vllm(place: Place) -> Stage:
    rollout = "actor_rollout_ref.rollout"
    command = _training(
        place,
        "c",
        "task_on_hardware=tool_rl-cpu",
        # no graphs are captured: a start is shorter, and a tiny model needs none
        f"{rollout}.enforce_eager=True",
        f"{rollout}.gpu_memory_utilization=0.3",
        "trainer.total_training_steps=3",
    )
    what = "the same with vLLM: rollout and actor agree"
    return Stage(
        "c", what, 300, command, {}, 3, needs="vllm", needs_gpu=True, rollout_is_the_actor=True
    )


def _wide_model(place: Place) -> list[Stage]:
    """Qwen2.5-1.5B's shape on the paper's settings, with attention in four ways."""
    is_tiny = place.device == "cpu"
    made = place.work / "d_model" / "made"
    size = ("--longest", "128", "--tiny") if is_tiny else ()
    tokenizer = ("--tokenizer", str(place.data / "tool_rl_policy"))
    make = (place.python, "-m", "workshop.gpu_kit.made_work", str(made), *tokenizer, *size)
    prompts = 4 if is_tiny else PROMPTS_OF_D
    steps = 2 if is_tiny else 3
    settings = (
        f"data.train_files={quoted(f'{made}/train.parquet')}",
        f"data.val_files={quoted(f'{made}/train.parquet')}",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        *(("data.max_prompt_length=128", "data.max_response_length=64") if is_tiny else ()),
        f"actor_rollout_ref.model.path={quoted(f'{made}/model')}",
        "actor_rollout_ref.rollout.name=made",
        "actor_rollout_ref.rollout.dtype=float32",
        f"reward.custom_reward_function.path={quoted(f'{REPO}/workshop/gpu_kit/made_work.py')}",
        f"trainer.total_training_steps={steps}",
        # the recipe for no GPU has one of its own
        *(["~task_on_hardware"] if is_tiny else []),
    )
    ways: tuple[tuple[str, str, int, list[str], str], ...] = (
        ("d_sdpa", "packed rows, PyTorch's attention a row", 420, ["attention=sdpa"], ""),
        ("d_flash", "packed rows, flash-attn", 300, ["attention=flash_attn"], "flash_attn"),
        ("d_padded", "padded rows", 420, list(_PADDED), ""),
    )
    trainings = [
        Stage(
            name,
            f"Qwen2.5-1.5B's shape, {what}",
            limit_s,
            _training(place, name, *settings, *overrides),
            {"VERL_USE_EXTERNAL_MODULES": MADE},
            steps,
            needs,
            needs_gpu=bool(needs),
            after="d_model",
        )
        for name, what, limit_s, overrides, needs in ways
    ]
    return [Stage("d_model", "that model and its rows are made", 180, make), *trainings]


_PADDED = (
    "attention=sdpa",
    "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.actor.use_dynamic_bsz=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)


def _training(place: Place, name: str, *overrides: str) -> list[str]:
    """verl's own trainer with our recipe; few processes, because each imports torch."""
    hardware = ["hardware=cpu"] if place.device == "cpu" else list(place.fitting)
    few = (
        *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "data.dataloader_num_workers=0",
    )
    whole = (
        *("trainer.val_before_train=False", "trainer.total_epochs=1000"),
        *("trainer.test_freq=-1", "trainer.save_freq=-1"),
    )
    recipes = ("--config-dir", str(REPO / "recipes"), "--config-name", "train")
    places = (f"data_dir={quoted(str(place.data))}", f"run_dir={quoted(str(place.work / name))}")
    main = (place.python, "-m", "verl.trainer.main_ppo", *recipes)
    return [*main, *hardware, *few, *whole, *places, *overrides]
