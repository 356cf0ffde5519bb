"""What `verl-gdpo check` asks verl's own code: a table of mistakes, and healthy runs.

`asked_mistakes.txt` and `asked_healthy.txt` are the lists. A line is what is added to `COMMAND`.
"""

import json
import shlex
import shutil

import pytest
from byte_tokenizer import make_tokenizer
from omegaconf import OmegaConf
from quick_composition import compose_quickly
from repository import REPO
from rows_for_check import MODEL_CONFIG
from saved_checkpoint import save_checkpoint

from verl_gdpo.hooks.other_key_names import MOVED, OTHER_NAMES
from verl_gdpo.tools.check.asked import ask_verl, engines, what_filters_lack
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.idle import IDLE, SWITCHES, look_at_switches
from verl_gdpo.tools.check.asked.models import folder_of_model
from verl_gdpo.tools.compose import PLAIN

# GRPO on four GPUs, each of which has eight samples of a step
COMMAND = """
algorithm.adv_estimator=grpo
data.train_batch_size=8 data.max_prompt_length=512 data.max_response_length=512
actor_rollout_ref.model.path=DATA/model
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2
trainer.n_gpus_per_node=4 trainer.default_local_dir=DATA/run
"""
STEPS = 12

TOOLS = """
tools:
  - class_name: verl.tools.base_tool.{name}
    config: {{type: native}}
"""
SCHEMA = """{type: function, function: {name: now, description: Says the time., parameters:
      {type: object, properties: {}, required: []}}}"""
LOOPS = """
- name: mine
  _target_: verl.experimental.agent_loop.single_turn_agent_loop.{name}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    models = {
        "model": {"max_position_embeddings": 2048},
        "six_heads": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
        "few_words": {"vocab_size": 50},
        # <eos> and <pad> are the last ones in it; transformers adds <|endoftext|>.
        "one_token_more": {"vocab_size": 258, "max_position_embeddings": 2048},
        "new_kind": {"model_type": "qwen99"},
        "no_class": {"architectures": None},
        "own_code": {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "qwen99"},
        "short": {"max_position_embeddings": 256},
        "no_weights": {"max_position_embeddings": 2048},
    }
    for name, values in models.items():
        make_tokenizer(folder / name)
        (folder / name / "config.json").write_text(json.dumps(MODEL_CONFIG | values))
        if name != "no_weights":
            (folder / name / "model.safetensors").write_text("")
    (folder / "file.py").write_text("")
    (folder / "no_dataset.py").write_text("class Rows: pass")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "tools.yaml").write_text(TOOLS.format(name="BaseTool"))
    (folder / "no_tools.yaml").write_text(TOOLS.format(name="BaseTol"))
    tool = TOOLS.format(name="BaseTool")
    (folder / "schemas.yaml").write_text(f"{tool}    tool_schema: {SCHEMA}")
    (folder / "schemaless.yaml").write_text(f"{tool}    tool_schema: {{name: now}}")
    (folder / "loops.yaml").write_text(LOOPS.format(name="SingleTurnAgentLoop"))
    (folder / "no_loops.yaml").write_text(LOOPS.format(name="SingleTurnAgentLop"))
    (folder / "empty_tools.yaml").write_text("tools: []")
    (folder / "nameless_loops.yaml").write_text(
        LOOPS.format(name="X").replace("name: mine", "a: b")
    )
    save_checkpoint(folder / "finished", 30, ranks=4)
    save_checkpoint(folder / "two_gpus", 30, ranks=2)
    return folder


@pytest.fixture
def answers(data, monkeypatch, tmp_path):
    """What verl answers to the command with more overrides; the last one of a key counts."""
    monkeypatch.chdir(tmp_path)

    def ask(added, is_elsewhere=False):
        given = {}
        for argument in shlex.split(f"{COMMAND} {added}".replace("DATA", str(data))):
            given[argument.lstrip("+").partition("=")[0]] = argument
        config = compose_quickly(None, PLAIN, list(given.values()))
        found = ask_verl(config, STEPS, is_elsewhere, given)
        assert list(tmp_path.iterdir()) == []
        return found

    return ask


def lines_of(name):
    """Four of five take a minute, and rarely fail."""
    lines = (REPO / "tests" / "tools" / f"asked_{name}.txt").read_text().splitlines()
    for number, line in enumerate(line for line in lines if not line.startswith("#")):
        yield pytest.param(line, marks=pytest.mark.slow if number % 5 else ())


@pytest.mark.parametrize("line", [*lines_of("mistakes")])
def test_a_mistake_is_named_with_its_key(answers, data, line):
    """A line is a mistake and the beginning of what is said of it, a problem unless it says so."""
    added, said = line.split(" | ")
    found = answers(added)
    texts = found.problems + [f"warning: {text}" for text in found.warnings]
    texts = [text.replace(str(data), "DATA") for text in texts]
    assert [text for text in texts if text.startswith(said)], (texts, found.notes)
    assert (found.problems == []) == said.startswith("warning: ")


@pytest.mark.parametrize("added", [*lines_of("healthy")])
def test_a_healthy_run_is_not_refused(answers, added):
    found = answers(added)
    assert (found.problems, found.warnings) == ([], [])
    unasked = [note for note in found.notes if "could not be asked" in note]
    assert unasked == []


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.tokenizer_path",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        "actor_rollout_ref.rollout.router_config_path",
        "data.custom_cls.path",
        "+ray_kwargs.ray_init.runtime_env.working_dir",
        "trainer.resume_mode=resume_path trainer.resume_from_path",
    ],
)
def test_what_another_machine_may_have_is_a_warning(answers, key):
    """If the folder around it is not here: a wrong name in a folder that is here is a problem."""
    found = answers(f"{key}=/no_such_folder/global_step_4", is_elsewhere=True)
    assert found.problems == []
    assert any("it may be where the run is" in text for text in found.warnings)
    found = answers(f"{key}=DATA/global_step_4", is_elsewhere=True)
    assert any("there is no" in text or "no model is there" in text for text in found.problems)


def test_bfloat16_on_a_processor_that_computes_it_in_a_loop_is_a_warning(answers, monkeypatch):
    """FSDP computes in bfloat16 where nothing is said."""
    on_cpu = "trainer.device=cpu actor_rollout_ref.rollout.name=hf"
    engine = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
    in_float32 = f"+{engine}={{param_dtype:fp32}} actor_rollout_ref.rollout.dtype=float32"

    def keys(added, is_fast=False, **options):
        monkeypatch.setattr(engines, "has_fast_bfloat16", lambda: is_fast)
        warnings = answers(added, **options).warnings
        return [text.partition("=")[0] for text in warnings if "AVX-512" in text]

    assert keys(on_cpu) == ["actor_rollout_ref.rollout.dtype", f"{engine}.param_dtype"]
    assert keys(f"{on_cpu} {in_float32}") == []
    assert keys(on_cpu, is_fast=True) == []
    assert keys(on_cpu, is_elsewhere=True) == []
    assert keys("trainer.device=cuda") == []


def test_a_module_of_another_machine_is_a_warning(answers):
    key = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    found = answers(f"{key}=no_such_package.Manager", is_elsewhere=True)
    assert found.problems == []
    assert any("it may be where the run is" in text for text in found.warnings)
    found = answers(f"{key}=verl.no_such_module.Manager", is_elsewhere=True)
    assert len(found.problems) == 1


def test_files_of_hydra_may_be_in_a_package_of_another_machine(checks):
    place = "hydra.searchpath=[pkg://no_such_package.config]"
    code, output, _ = checks("--elsewhere", place, "actor@actor_rollout_ref.actor=theirs")
    assert code == 0
    assert "warning: hydra.searchpath: no_such_package is not installed here" in output
    code, _, _ = checks(place, "actor@actor_rollout_ref.actor=theirs")
    assert code == 1


def test_idle_settings_are_keys_of_verls_with_its_defaults():
    """One of another name or default would warn of nothing, or of each run."""
    config = compose_quickly(None, PLAIN, [])
    for idle in IDLE:
        value = OmegaConf.select(config, idle.key)
        if idle.key.endswith("repetition_penalty"):
            assert value is None  # It is a key of verl's class alone.
        else:
            assert value == idle.default, idle.key


def test_switches_are_keys_of_verls_with_its_defaults():
    config = compose_quickly(None, PLAIN, [])
    for switch in SWITCHES:
        for key, default in {switch.key: switch.off, **switch.keys}.items():
            assert OmegaConf.select(config, key) == default, key
        for key in switch.others:
            block, _, name = key.rpartition(".")
            assert name in OmegaConf.select(config, block), key


def test_a_setting_of_a_recipe_with_its_switch_off_is_not_said(data):
    """The recipe has both, and the user turns the switch alone."""
    config = compose_quickly(None, PLAIN, ["actor_rollout_ref.actor.kl_loss_coef=0.04"])
    found = Answers()
    look_at_switches(config, ["actor_rollout_ref.actor.use_kl_loss"], found)
    look_at_switches(config, [], found)
    assert found.warnings == []


def test_no_message_names_a_key_that_verl_does_not_read():
    """What a misspelt or foreign key is called in verl has to be of use."""
    named = {*OTHER_NAMES.values(), *MOVED.values()}
    assert [idle.key for idle in IDLE if idle.key in named] == []


def test_an_unknown_function_of_verl_refuses_nothing():
    def of_another_version(_too, _many):
        """verl may change what its functions take."""

    found = Answers()
    assert found.ask("trainer.mode", of_another_version) is None
    assert found.problems == []
    assert "trainer.mode: not checked" in found.notes[0]


def test_a_part_that_another_version_lacks_is_a_note():
    def look(config, _answers):
        config["key of verl 0.9"]

    found = Answers()
    found.look("batches", look, {})
    assert found.problems == []
    assert "batches: not checked" in found.notes[0]


def test_a_model_that_is_not_here_is_a_note(answers):
    found = answers("actor_rollout_ref.model.path=org/model")
    assert found.problems == []
    assert any("not on this machine" in note for note in found.notes)


def test_code_of_a_model_is_not_run(answers):
    found = answers("actor_rollout_ref.model.path=DATA/own_code")
    assert found.problems == []
    assert any("code of its own, which is not run" in note for note in found.notes)


def test_a_folder_of_a_model_may_be_fetched_before(data, monkeypatch, tmp_path):
    snapshot = tmp_path / "models--org--model" / "snapshots" / "1"
    shutil.copytree(data / "model", snapshot)
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert folder_of_model("org/model") == snapshot
    assert folder_of_model("org/other") is None


FILTER = "algorithm.filter_groups.enable=True algorithm.filter_groups.metric"


@pytest.mark.parametrize("metric", ["acc", "reward"])
def test_groups_are_filtered_by_what_rewards_return(metric):
    config = compose_quickly(None, PLAIN, f"{FILTER}={metric}".split())
    assert what_filters_lack(config, [{"acc": 1.0, "score": 1.0}]) == []


def test_what_a_resumed_run_would_begin_anew_is_a_note(answers):
    """Many leave the optimizer out, to save space on the disk."""
    key = "actor_rollout_ref.actor.checkpoint"
    found = answers(f"trainer.save_freq=5 {key}.save_contents=[model,hf_model]")
    (note,) = [text for text in found.notes if key in text]
    assert note.startswith(f"{key}.load_contents=['model', 'hf_model']: a run that is resumed goes")
    assert "begins anew with optimizer (its moments), extra (" in note
    found = answers("trainer.save_freq=5")
    assert [text for text in found.notes if key in text] == []


def test_groups_cannot_be_filtered_by_what_rewards_do_not_return():
    config = compose_quickly(None, PLAIN, f"{FILTER}=accuracy".split())
    config.algorithm.adv_estimator = "grpo"
    found = what_filters_lack(config, [{"acc": 1.0, "score": 1.0}])
    assert "algorithm.filter_groups.metric=accuracy" in found[0]
    assert "['acc', 'score']" in found[0]


def test_with_gdpo_groups_are_filtered_by_what_some_rewards_return():
    """`FilterMetric` ends a run that returns no such value; sums are GDPO's own signal."""
    config = compose_quickly(None, PLAIN, f"{FILTER}=accuracy".split())
    config.algorithm.adv_estimator = "gdpo"
    # Another source may return it, and a real response may have it.
    assert what_filters_lack(config, [{"acc": 1.0}, {"accuracy": None}]) == []
    (found,) = what_filters_lack(config, [{"acc": 1.0}])
    assert found.startswith("algorithm.filter_groups.metric=accuracy: no reward returns it")
    # Nobody has called the function that may return it.
    config.algorithm.filter_groups.metric = "judge__clear"
    assert what_filters_lack(config, [{"acc": 1.0}], silent=["judge"]) == []
    for of_sum in ("reward", "score", "seq_reward", "seq_final_reward"):
        config.algorithm.filter_groups.metric = of_sum
        assert what_filters_lack(config, [{"acc": 1.0}]) == []
