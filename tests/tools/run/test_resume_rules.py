"""Which changes of a run are refused, and how settings and files are compared."""

import os
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest
from composed_recipes import composed, keys_of
from omegaconf import OmegaConf

from verl_gdpo.tools.run.resume import (
    AT_CONSTANT_RATE,
    FREE,
    ON_REQUEST,
    PATTERNS,
    PLACE,
    changes,
    file_states,
    refusal,
    remarks,
    verdict_of,
)
from verl_gdpo.tools.run.starts import StartManifest


@pytest.mark.parametrize(
    ("verdict", "keys"),
    [
        (ON_REQUEST, "data.train_files data.val_files data.seed seed data.dataloader_num_workers"),
        (ON_REQUEST, "data.train_batch_size data.max_prompt_length"),
        (AT_CONSTANT_RATE, "trainer.total_training_steps trainer.total_epochs"),
        (ON_REQUEST, "actor_rollout_ref.actor.optim.lr critic.optim.weight_decay"),
        (ON_REQUEST, "trainer.n_gpus_per_node actor_rollout_ref.actor.fsdp_config.fsdp_size"),
        (ON_REQUEST, "actor_rollout_ref.model.path actor_rollout_ref.model.lora_rank"),
        (ON_REQUEST, "actor_rollout_ref.model.override_config.dropout algorithm.adv_estimator"),
        (ON_REQUEST, "actor_rollout_ref.rollout.n algorithm.gdpo.rewards.format"),
        (ON_REQUEST, "reward.custom_reward_function.path data.filter_overlong_prompts"),
        (FREE, "trainer.save_freq trainer.val_before_train trainer.logger trainer.hang_minutes"),
        (FREE, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu reward.num_workers"),
        (FREE, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"),
        (FREE, "actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
        (FREE, "actor_rollout_ref.model.override_config.attn_implementation"),
        (PLACE, "run_dir data_dir trainer.default_local_dir ray_kwargs.ray_init._temp_dir"),
    ],
)
def test_the_verdict_of_a_key(verdict, keys):
    assert {key: verdict_of(key) for key in keys.split()} == dict.fromkeys(keys.split(), verdict)


def test_every_pattern_is_of_a_key_of_verl():
    folder = Path(find_spec("verl").origin).parent / "trainer" / "config"
    megatron = OmegaConf.load(folder / "_generated_ppo_megatron_trainer.yaml")
    keys = {*keys_of(composed("+own_keys=[data.mine]")), *keys_of(megatron)}
    patterns = {pattern for verdict in PATTERNS.values() for pattern in verdict}
    assert {p for p in patterns if not any(fnmatchcase(key, p) for key in keys)} == set()


def changed(before, after):
    return changes(*(StartManifest("", configuration=one) for one in (before, after)))


def test_a_refusal_says_what_to_do():
    found = changed(
        {"algorithm": {"adv_estimator": "grpo"}, "n": 1, "run_dir": "a", "trainer": {"val_x": 1}},
        {"algorithm": {"adv_estimator": "gdpo"}, "n": 2, "run_dir": "b", "trainer": {"val_x": 2}},
    )
    assert found == {
        "algorithm.adv_estimator": ["grpo", "gdpo", ON_REQUEST],
        "n": [1, 2, ON_REQUEST],
        "trainer.val_x": [1, 2, FREE],
    }
    message = refusal(found, ())
    assert message.startswith("algorithm.adv_estimator: 'grpo' -> 'gdpo', n: 1 -> 2. ")
    assert "'+allow_change=[algorithm.adv_estimator,n]'" in message
    assert "--allow-change algorithm.adv_estimator --allow-change n" in message
    assert "\n" not in message  # the launcher shows one line of an exception
    assert refusal(found, ["algorithm"]).startswith("n: 1 -> 2. ")
    assert refusal(found, ["algo", "n"]).startswith("algorithm.adv_estimator")  # no block
    assert refusal(found, ["algorithm", "n"]) == ""
    assert "and 92 more" in refusal(changed({}, {f"x{n}": n for n in range(100)}), ())


STEPS = "trainer.total_training_steps"


def with_steps(steps, *overrides):
    """The settings of a run of verl with so many steps, as they are recorded."""
    given = OmegaConf.merge(composed(), OmegaConf.from_dotlist([f"{STEPS}={steps}", *overrides]))
    return OmegaConf.to_container(given)


ACTOR = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize(
    ("overrides", "verdict"),
    [
        ([], FREE),
        ([f"{ACTOR}.lr_warmup_steps=10", f"{ACTOR}.lr_warmup_steps_ratio=0.1"], FREE),
        ([f"{ACTOR}.lr_warmup_steps_ratio=0.1"], ON_REQUEST),
        ([f"{ACTOR}.lr_scheduler_type=cosine"], ON_REQUEST),
        ([f"{ACTOR}.warmup_style=cosine"], ON_REQUEST),  # which verl takes before the other
        ([f"{ACTOR}.lr_scheduler_type=null"], ON_REQUEST),  # an engine that reads other keys
        (["critic.optim.lr_scheduler_type=cosine"], ON_REQUEST),
        (["trainer.critic_warmup=${trainer.total_training_steps}"], ON_REQUEST),
    ],
)
def test_more_steps_need_no_word_where_nothing_depends_on_them(overrides, verdict):
    """tests/slow/resume.py has what verl's schedules do with other numbers of steps."""
    found = changed(with_steps(10, *overrides), with_steps(20, *overrides))
    assert found == {STEPS: [10, 20, verdict]}
    said = "".join(remarks(found))
    assert (f"{STEPS}: 10 -> 20: the learning rate is constant" in said) == (verdict == FREE)
    assert bool(refusal(found, ())) == (verdict == ON_REQUEST)


def test_more_steps_with_another_schedule_need_a_word():
    found = changed(with_steps(10, f"{ACTOR}.lr_scheduler_type=cosine"), with_steps(20))
    assert found[STEPS] == [10, 20, ON_REQUEST]


def test_nothing_and_no_key_are_one():
    assert changed({"a": None, "b": 1, "c": []}, {"b": 1.0}) == {}


def of_files(*names):
    configuration = {"data": {"train_files": [*names]}}
    return StartManifest("", file_states(configuration), configuration=configuration)


def test_files_are_compared_by_size_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "1", "b": "22"}.items():
        (tmp_path / name).write_text(text)

    def is_other(before, after):
        return changes(before, after).keys() == {"data.train_files"}

    before = of_files("a", "b")
    (tmp_path / "a").rename("c")
    assert not is_other(before, of_files("c", "b"))
    assert is_other(before, of_files("b", "c"))
    os.utime("c", (1, 1))
    assert is_other(before, of_files("c", "b"))  # a copy may have another time
    before = of_files("b")
    time = os.stat("b").st_mtime
    (tmp_path / "b").write_text("333")
    os.utime("b", (time, time))
    assert is_other(before, of_files("b"))
    # without size and time, the names count
    assert not is_other(replace(before, files={}), of_files("b"))
    assert is_other(replace(before, files={}), of_files("c"))


def test_a_models_folder_is_compared_by_its_size(tmp_path):
    states = []
    for name, more in {"a": "", "b": "", "c": "x"}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text(f"weights{more}")
        os.utime(folder / "weights", (len(states), 1))
        states.append(file_states({"model": {"path": str(folder)}})["model.path"])
    assert states[0] == states[1] != states[2]
