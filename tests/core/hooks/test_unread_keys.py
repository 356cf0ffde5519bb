"""Keys that nobody reads: the misspelt are refused, with the key that is meant, and no others."""

import sys
from types import SimpleNamespace

import pytest
import verl
from composed_recipes import composed as recipe
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from quick_composition import compose_quickly
from stand_in import stand_in

from verl_gdpo.algorithm.settings import SettingsError
from verl_gdpo.hooks import driver, unread_keys, verl_keys
from verl_gdpo.hooks.unread_keys import UnreadKeys, find_unread_keys, meant_by

GDPO = ["algorithm.adv_estimator=gdpo", "reward.reward_manager.name=gdpo"]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

# (override, the key that is meant)
MISSPELT = [
    ("+reward.max_concurent=2", "reward.max_concurrent"),
    ("+reward.time_out=30", "reward.timeout"),
    ("+reward.reward_function.x.path=rewards.py", "reward.reward_functions"),
    ("+reward.reward_kwarg.length=400", "reward.reward_kwargs"),
    ("+algorithm.gdop.eps=1", "algorithm.gdpo"),
    ("+algorithm.gdpo_reward_key=[a]", "algorithm.gdpo_reward_keys"),
    ("+data.max_promt_length=5", "data.max_prompt_length"),
    ("+data.prompt_max_length=5", "data.max_prompt_length"),
    ("+data.image_keys=pictures", "data.image_key"),
    ("+data.maxPromptLength=5", "data.max_prompt_length"),
    ("+trainer.hang_minute=5", "trainer.hang_minutes"),
    ("+trainer.max_ckpt_to_keep=2", "trainer.max_actor_ckpt_to_keep"),
    (
        "+trainer.v1.sampler.max_off_policy_treshold=2",
        "trainer.v1.sampler.max_off_policy_threshold",
    ),
    (
        "+actor_rollout_ref.actor.fsdp_config.param_ofload=True",
        "actor_rollout_ref.actor.fsdp_config.param_offload",
    ),
    (f"+{ROLLOUT}.multi_turn.max_asistant_turns=3", f"{ROLLOUT}.multi_turn.max_assistant_turns"),
    # the very name of a key of another block
    ("+algorithm.max_concurrent=2", "reward.max_concurrent"),
    ("+trainer.max_rpm=30", "reward.max_rpm"),
    ("+reward.thought_tag=x", "reward.thought_tags"),
    ("+data.hang_minutes=5", "trainer.hang_minutes"),
    # a whole block
    ("+algoritm.gdpo.eps=1", "algorithm"),
    ("+own_key=[data.mine]", "own_keys"),
]

# lines of verl's example scripts, for other engines and trainers too
HONEST = [
    "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32",
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=flashinfer",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0",
    "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
    "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is=token",
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
    "+reward.reward_kwargs.max_resp_len=8192",
    "+reward.custom_reward_function.reward_kwargs.router_address=localhost",
    "+algorithm.gdpo_reward_keys=[accuracy_reward,format_reward]",
    "+data.apply_chat_template_kwargs.enable_thinking=True",
    "+data.cache_dir=/tmp/cache",
    "+data.filter_prompts=False",
    "++actor_rollout_ref.rollout.prometheus.enable=True",
    "++actor_rollout_ref.rollout.agent.agent_loop_manager_class=null",
    "+ray_kwargs.ray_init.runtime_env.env_vars.A=b",
]


@pytest.fixture(autouse=True)
def version_of_the_table(monkeypatch):
    """With another version nothing is refused, and `nox -s verl` runs these tests on one.

    Its own configuration, to which the tests add keys, may have more than the table.
    """
    tables = unread_keys._tables_for(unread_keys.verl.__version__)
    monkeypatch.setattr(unread_keys, "_tables", lambda: tables)
    monkeypatch.setattr(unread_keys, "VERL_VERSION", verl_keys.VERSION)


def plain(*overrides):
    """verl's configuration with overrides, of blocks that it does not have too."""
    config = compose_quickly(None, "ppo_trainer", GDPO)
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    return config


def refused_keys(found):
    """{the key that a refusal begins with: the refusal}"""
    keys = [refusal.partition(":")[0].partition("=")[0] for refusal in found.refusals]
    return dict(zip(keys, found.refusals, strict=True))


def test_a_misspelt_key_is_refused_with_the_one_that_is_meant():
    found = find_unread_keys(plain(*[override for override, _ in MISSPELT]))
    assert found.warnings == []
    refusals = refused_keys(found)
    assert len(refusals) == len(found.refusals) == len(MISSPELT)
    for override, meant in MISSPELT:
        key = override.lstrip("+").partition("=")[0]
        # of a block that nobody reads, the block is named
        (refusal,) = [text for begin, text in refusals.items() if key.startswith(begin)]
        assert f"did you mean {meant}" in refusal


def test_lines_of_verls_examples_are_taken():
    assert find_unread_keys(plain(*HONEST)) == UnreadKeys()


@pytest.mark.parametrize("engine", ["dp", "megatron", "torchtitan", "veomni"])
def test_verls_own_configuration_has_no_unread_key(engine):
    config = compose_quickly(None, "ppo_trainer", [*GDPO, f"model_engine={engine}"])
    assert find_unread_keys(config) == UnreadKeys()


def test_a_key_that_is_close_to_nothing_gets_one_line():
    found = find_unread_keys(plain("+data.my_option=7", "+trainer.my_note=late", "+trainer.seed=1"))
    assert found.refusals == []
    (line,) = found.warnings
    assert "data.my_option, trainer.my_note, trainer.seed (" in line
    assert "'+own_keys=[data.my_option,trainer.my_note,trainer.seed]'" in line


# {a key that a class of verl does not take: words of the refusal}
NOT_TAKEN = {
    f"{ACTOR}.optim.my_option": "verl makes a FSDPOptimizerConfig of",
    f"{ACTOR}.optim.learning_rate": f"did you mean {ACTOR}.optim.lr?",
    f"{ROLLOUT}.val_kwarg": f"did you mean {ROLLOUT}.val_kwargs?",
    "actor_rollout_ref.model.lora_rnk": "did you mean actor_rollout_ref.model.lora_rank?",
}


@pytest.mark.parametrize("version", [verl_keys.VERSION, "0.9.2"])
def test_a_key_at_which_verl_would_stop_is_refused(monkeypatch, version):
    """Whatever the tables say of another version: the class itself is asked."""
    monkeypatch.setattr(unread_keys, "VERL_VERSION", version)
    overrides = [f"+{key}=1" for key in NOT_TAKEN]
    found = find_unread_keys(plain(*overrides, "data.custom_cls.path=mine.py"))
    assert found.warnings == []
    assert {*found.not_taken} == {*NOT_TAKEN}
    refusals = refused_keys(found)
    assert len(refusals) == len(found.refusals)
    for key, words in NOT_TAKEN.items():
        assert words in refusals[key]
    # A key of the user's own does not help: verl would stop at it all the same.
    own = f"+own_keys=[{','.join(NOT_TAKEN)}]"
    assert len(find_unread_keys(plain(*overrides, own)).refusals) == len(NOT_TAKEN)


@pytest.mark.parametrize("key", ["param_offload", "learning_rate"])
def test_keys_of_the_critic_matter_to_a_run_that_has_one(key):
    """The first is one of an older version of verl."""
    override = f"+critic.model.fsdp_config.{key}=1"
    found = find_unread_keys(plain(override))
    assert found.refusals == []
    (warning,) = found.warnings
    assert "critic.model.fsdp_config" in warning
    for trains in ("algorithm.adv_estimator=gae", "critic.enable=True"):
        found = find_unread_keys(plain(override, trains))
        assert found.not_taken == ["critic.model.fsdp_config"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("custom_reward_function.path=a.py", "reward.custom_reward_function.path=a.py"),
        ("sandbox_fusion.url=http://a", "reward.sandbox_fusion.url=http://a"),
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name=dapo"),
        ("reward_model.enable=True", "reward.reward_model.enable=True"),
        ("reward_model.model.path=org/m", "reward.reward_model.model_path=org/m"),
        ("reward_model.rollout.name=vllm", "reward.reward_model.rollout.name=vllm"),
    ],
)
def test_a_key_of_an_older_verl_is_refused_with_the_new_one(old, new):
    (refusal,) = find_unread_keys(plain(old)).refusals
    assert refusal.startswith(f"{old}: this verl does not read the key")
    assert refusal.endswith(f"Set {new}")


def test_which_key_a_refused_override_means():
    assert meant_by("critic.modl.path") == ["critic.model.path"]
    assert meant_by("trainer.learning_rate") == [f"{ACTOR}.optim.lr"]
    assert meant_by("data.my_option") == []
    assert meant_by(f"{ROLLOUT}.engine_kwargs.vllm.anything") == []


def test_own_keys_are_allowed_with_all_below_them():
    lines = ["+data.image_keys=[a]", "+reward.reward_function.x.path=a", "+trainer.my_note=late"]
    allowed = "+own_keys=[data.image_keys,reward.reward_function,trainer]"
    assert find_unread_keys(plain(*lines, allowed)) == UnreadKeys()
    assert find_unread_keys(plain(lines[0], "+own_keys=data.image_keys")) == UnreadKeys()
    # the name alone is no beginning of another one
    found = find_unread_keys(plain(lines[0], "+own_keys=[data.image]"))
    assert len(found.refusals) == 1


@pytest.mark.parametrize("keys", ["{a: b}", "[1]", "3"])
def test_own_keys_that_are_no_list_of_keys(keys):
    with pytest.raises(ValueError, match=r"own_keys=.*: expected a list of keys"):
        find_unread_keys(plain(f"+own_keys={keys}"))


@pytest.mark.parametrize(
    ("users", "override"),
    [
        ("data.custom_cls.path=mine.py", "+data.image_keys=a"),
        ("reward.reward_manager.source=importlib", "+reward.max_concurent=2"),
        (f"+{ROLLOUT}.agent.agent_loop_manager_class=my.Manager", "+trainer.time_out=2"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml", "+data.image_keys=2"),
        ("trainer.v1.sampler.custom_sampler.path=s.py", "+trainer.v1.sampler.sampler_kwarg=2"),
        ("actor_rollout_ref.actor._target_=mine.Actor", "+actor_rollout_ref.actor.clip_ratios=2"),
    ],
)
def test_a_block_that_the_users_code_gets_is_warned_of(users, override):
    assert len(find_unread_keys(plain(override.replace("time_out", "test_freqs"))).refusals) == 1
    found = find_unread_keys(plain(users, override.replace("time_out", "test_freqs")))
    assert found.refusals == []
    (warning,) = found.warnings
    assert "did you mean" in warning


def test_code_that_the_user_registered_gets_its_block(monkeypatch):
    registries = {
        ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"): {"gdpo": SimpleNamespace},
        ("verl.experimental.agent_loop.agent_loop", "_agent_loop_registry"): {
            "single_turn_agent": {"_target_": "mine.Loop"}
        },
    }
    overrides = ["+algorithm.gdop=1", "+data.image_keys=1"]
    assert len(find_unread_keys(plain(*overrides)).refusals) == 2
    for (module, registry), entries in registries.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{registry: entries}))
    found = find_unread_keys(plain(*overrides))
    assert (found.refusals, len(found.warnings)) == ([], 2)


def test_a_trainer_of_the_users_may_read_any_key():
    theirs = type("TaskRunner", (), {"__module__": "my_recipe.main"})
    verls = type("TaskRunner", (), {"__module__": "verl.trainer.main_ppo"})
    config = plain("+trainer.time_out=1", "+data.my_option=7", "+data.image_keys=a")
    assert len(find_unread_keys(config, verls).refusals) == 1
    found = find_unread_keys(config, theirs)
    assert found.refusals == []
    assert len(found.warnings) == 1


def test_verls_main_module_is_no_code_of_the_users(monkeypatch, tmp_path):
    """`python -m verl.trainer.main_ppo` runs it as `__main__`, and so does a script of the user."""
    runner = type("TaskRunner", (), {"__module__": "__main__"})
    config = plain("+data.image_keys=a")
    for file, refused in ((f"{verl.__path__[0]}/trainer/main_ppo.py", 1), (tmp_path / "a.py", 0)):
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(file)))
        assert len(find_unread_keys(config, runner).refusals) == refused


def test_an_interpolation_reads_a_key():
    lines = ["+data.image_keys=5", "+data.max_promt_length=5", "+data.my.block.key=3", "+my.x=1"]
    readers = [
        "data.image_key=${data.image_keys}",
        "data.max_prompt_length=${.max_promt_length}",
        "data.max_response_length=${oc.select:data.my.block.key,1}",
    ]
    assert find_unread_keys(plain(*lines, *readers)) == UnreadKeys()
    assert len(find_unread_keys(plain(*lines)).refusals) == 2


@pytest.mark.parametrize("other", ["0.9.0", "0.9.2"])
def test_with_another_verl_than_the_tables_nothing_is_refused(monkeypatch, other):
    monkeypatch.setattr(unread_keys, "VERL_VERSION", other)
    found = find_unread_keys(plain("+data.max_promt_length=5"))
    assert found.refusals == []
    (warning,) = found.warnings
    assert f"this is verl {other}; did you mean data.max_prompt_length?" in warning


def test_what_another_verls_own_configuration_has_is_read(monkeypatch, tmp_path):
    """As `data.continuous_token` of verl 0.9.0, which stands in the configuration of each run."""
    folder = tmp_path / "trainer" / "config"
    folder.mkdir(parents=True)
    (folder / "_generated_ppo_trainer.yaml").write_text("data:\n  newer: {enable: false}\n")
    with monkeypatch.context() as installed:
        installed.setattr(unread_keys.verl, "__path__", [str(tmp_path)])
        tables = unread_keys._tables_for("0.9.2 of this test")
    monkeypatch.setattr(unread_keys, "_tables", lambda: tables)
    monkeypatch.setattr(unread_keys, "VERL_VERSION", "0.9.2")
    assert find_unread_keys(plain("+data.newer.enable=true")) == find_unread_keys(plain())
    warnings = find_unread_keys(plain("+data.neewer.enable=true")).warnings
    assert "did you mean data.newer?" in warnings[0]


def started(config):
    calls = []
    stand_in(driver.check_and_run, lambda config: calls.append(config))(config)
    return calls


@pytest.fixture
def start_config(tmp_path):
    def make(*overrides):
        config = recipe("hardware=cpu", f"run_dir={tmp_path}/run", *overrides)
        OmegaConf.set_struct(config, False)
        return config

    return make


def test_the_start_of_a_run_refuses_all_of_them_at_once(start_config):
    with pytest.raises(ValueError, match="max_concurrent") as error:
        started(start_config("+reward.max_concurent=2", "+data.max_promt_length=5"))
    assert len(error.value.mistakes) == 2


def test_the_start_of_a_run_tells_mistakes_of_all_kinds_at_once(start_config):
    """A misspelt key, a setting, a limit, tags, and the launcher's minutes."""
    mistakes = {
        "+data.max_promt_length=5": "did you mean data.max_prompt_length?",
        "+algorithm.gdpo.epss=1": "did you mean 'eps'?",
        "+reward.max_rpm=none": "reward.max_rpm=none",
        "+reward.max_tpm=none": "reward.max_tpm=none",
        "+reward.thought_tags=[a]": "reward.thought_tags",
        "++trainer.hang_minutes=soon": "trainer.hang_minutes='soon'",
    }
    with pytest.raises(SettingsError) as error:
        started(start_config(*mistakes))
    told = error.value.mistakes
    assert len(told) == len(mistakes)
    for words in mistakes.values():
        assert [text for text in told if words in text], words


def test_the_start_of_a_run_warns_and_goes_on(start_config, capsys):
    config = start_config("+data.my_option=7", "+data.image_keys=a", "+own_keys=[data.image_keys]")
    assert started(config) == [config]
    assert "neither verl 0.9.1 nor verl-gdpo reads data.my_option." in capsys.readouterr().err


def test_a_run_without_gdpo_is_not_looked_at(start_config, monkeypatch):
    def forbidden(*_):
        raise AssertionError

    monkeypatch.setattr(driver, "find_unread_keys", forbidden)
    config = start_config("estimator=grpo", "+data.max_promt_length=5")
    config.reward.reward_manager.name = "naive"
    assert started(config) == [config]
