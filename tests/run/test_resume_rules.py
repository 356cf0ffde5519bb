"""Which changes of a run are refused, free or on request, and their table in the docs."""

import re
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest
from composed_recipes import composed, keys_of
from omegaconf import OmegaConf
from repository import REPO

from verl_gdpo.run.resume_rules import (
    FREE,
    ON_REQUEST,
    RULES,
    changes,
    refusal,
    without_followers,
)
from verl_gdpo.run.starts import StartManifest

OPTIM = {"lr": 1e-6, "lr_scheduler_type": "constant", "lr_warmup_steps": -1}


def settings(**keys):
    """A configuration from dotted keys, written with `__`."""
    made = {}
    for key, value in keys.items():
        *path, last = key.split("__")
        block = made
        for name in path:
            block = block.setdefault(name, {})
        block[last] = value
    return StartManifest("", configuration=made)


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        ("data__train_files", ON_REQUEST),
        ("data__seed", ON_REQUEST),
        ("data__dataloader_num_workers", ON_REQUEST),
        ("data__train_batch_size", ON_REQUEST),
        ("actor_rollout_ref__actor__optim__lr", ON_REQUEST),
        ("critic__optim__weight_decay", ON_REQUEST),
        ("trainer__n_gpus_per_node", ON_REQUEST),
        ("actor_rollout_ref__actor__fsdp_config__fsdp_size", ON_REQUEST),
        ("actor_rollout_ref__model__path", ON_REQUEST),
        ("actor_rollout_ref__model__lora__rank", ON_REQUEST),
        ("actor_rollout_ref__model__lora_rank", ON_REQUEST),
        ("trainer__save_freq", FREE),
        ("trainer__val_before_train", FREE),
        ("trainer__logger", FREE),
        ("trainer__default_local_dir", FREE),
        ("actor_rollout_ref__rollout__gpu_memory_utilization", FREE),
        ("actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu", FREE),
        ("actor_rollout_ref__rollout__log_prob_max_token_len_per_gpu", FREE),
        ("actor_rollout_ref__actor__fsdp_config__optimizer_offload", FREE),
        ("ray_kwargs__ray_init___temp_dir", FREE),
        ("actor_rollout_ref__model__override_config__attn_implementation", FREE),
        ("actor_rollout_ref__model__override_config__dropout", ON_REQUEST),
        ("algorithm__adv_estimator", ON_REQUEST),
        ("algorithm__gdpo__rewards__format", ON_REQUEST),
        ("actor_rollout_ref__rollout__n", ON_REQUEST),
        ("actor_rollout_ref__actor__ppo_mini_batch_size", ON_REQUEST),
        ("actor_rollout_ref__actor__optim__clip_grad", ON_REQUEST),
        ("data__val_files", ON_REQUEST),
        ("reward__custom_reward_function__path", ON_REQUEST),
    ],
)
def test_the_list_of_a_key(key, verdict):
    (change,) = changes(settings(**{key: "a"}), settings(**{key: "b"}))
    assert change.rule.verdict == verdict
    dotted = key.replace("__", ".")
    assert change.key == dotted
    assert (refusal([change], ()) == "") == (verdict == FREE)
    assert refusal([change], (dotted,)) == ""


@pytest.mark.parametrize(
    ("optim", "verdict"),
    [
        ({}, FREE),
        ({"lr_scheduler_type": "cosine"}, ON_REQUEST),
        ({"lr_warmup_steps_ratio": 0.1}, ON_REQUEST),
        ({"lr_warmup_steps_ratio": 0.1, "lr_warmup_steps": 5}, FREE),
    ],
)
def test_more_steps_are_free_at_a_constant_rate(optim, verdict):
    keys = {f"actor_rollout_ref__actor__optim__{k}": v for k, v in {**OPTIM, **optim}.items()}
    before, after = (settings(**keys, trainer__total_training_steps=n) for n in (3, 5))
    (change,) = changes(before, after)
    assert change.rule.verdict == verdict


@pytest.mark.parametrize(("filtered", "verdict"), [(True, ON_REQUEST), (False, ON_REQUEST)])
def test_longer_prompts_are_other_rows_where_they_are_filtered(filtered, verdict):
    before, after = (
        settings(data__filter_overlong_prompts=filtered, data__max_prompt_length=n) for n in (3, 5)
    )
    assert changes(before, after)[0].rule.verdict == verdict


def test_a_refusal_says_what_to_do():
    before = settings(algorithm__adv_estimator="grpo", data__seed=1, trainer__save_freq=1)
    after = settings(algorithm__adv_estimator="gdpo", data__seed=2, trainer__save_freq=2)
    message = refusal(changes(before, after), ())
    assert "data.seed: 1 -> 2 on request only: the order of the rows comes from" in message
    assert "merge the weights" in message and "the state of the optimizer is lost" in message
    assert "algorithm.adv_estimator: 'grpo' -> 'gdpo' on request only" in message
    assert "--allow-change algorithm.adv_estimator" in message and "save_freq" not in message
    assert "\n" not in message  # the launcher shows one line of an exception
    message = refusal(changes(before, after), ["algorithm"])
    assert "adv_estimator" not in message and "data.seed" in message
    message = refusal(changes(before, after), ["data"])
    assert "adv_estimator" in message and "merge" not in message
    assert refusal(changes(settings(ab=1), settings(ab=2)), ["a"])


def test_what_follows_another_key_is_not_asked_for_again():
    """`critic.rollout_n` is `rollout.n`; the data's seed is refused, though `seed` is free."""
    before, after = (
        settings(rollout__n=n, critic__rollout_n=n, seed=n, data__seed=n, a__b=n, a__c=n)
        for n in (4, 2)
    )
    composed = {
        "critic.rollout_n": "${oc.select:rollout.n,1}",
        "data.seed": "${seed}",
        "a.c": "${.b}",
        "a.b": 2,
    }
    changed = without_followers(changes(before, after), composed)
    assert {change.key for change in changed} == {"rollout.n", "seed", "data.seed", "a.b"}
    assert "data.seed" in refusal(changed, ["rollout.n", "a.b"])


def test_every_rule_decides_something():
    assert RULES[-1].keys == ("*",)
    patterns = [pattern for rule in RULES for pattern in rule.keys]
    conditional = {key for rule in RULES if rule.condition for key in rule.keys}
    repeated = {pattern for pattern in patterns if patterns.count(pattern) > 1}
    assert repeated <= conditional


def test_every_pattern_is_of_a_key_of_verl():
    folder = Path(find_spec("verl").origin).parent / "trainer" / "config"
    megatron = OmegaConf.load(folder / "_generated_ppo_megatron_trainer.yaml")
    keys = {*keys_of(composed()), *keys_of(megatron)}
    patterns = {pattern for rule in RULES for pattern in rule.keys}
    assert {p for p in patterns if not any(fnmatchcase(key, p) for key in keys)} == set()


def test_the_table_in_the_docs():
    text = (REPO / "docs" / "failures.md").read_text()
    (shown,) = re.findall(r"<!-- rules -->\n(.*?)<!-- end -->", text, re.S)
    rows = ["| list | keys | what a change does |", "|---|---|---|"]
    for rule in RULES:
        keys = ", ".join(f"`{key}`" for key in rule.keys) if rule.keys != ("*",) else "every other"
        rows.append(f"| {rule.verdict} | {keys} | {rule.why} |")
    assert shown.strip().splitlines() == rows
