"""`verl-gdpo check` with the run's tokenizer and chat template: thoughts, tags, calls, lengths."""

import json
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pytest
from byte_tokenizer import make_tokenizer
from quick_composition import compose_quickly
from rows_for_check import MODEL_CONFIG
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tool_loop import tools_config
from tool_rows import tool_row
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl_gdpo.tasks import TASK_BY_SOURCE
from verl_gdpo.tools.check import good_responses, prompts, template_calls
from verl_gdpo.tools.check.data_files import DataFile, DataRow
from verl_gdpo.tools.compose import PLAIN

# as those of Qwen are made: tools, messages with calls, and a header that may begin a thought
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'alien' %}{{ raise_exception('no such role') }}{% endif %}<|im_start|>
{{- message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
THOUGHT{% endif %}"""
JSON_CALL = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
XML_CALL = (
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
CALLS = {
    "toolrl": f"<tool_call>\n{JSON_CALL}\n</tool_call>".replace("KEY", "parameters"),
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>".replace("KEY", "arguments"),
    "qwen3_coder": XML_CALL,
    "llama3_json": JSON_CALL.replace("KEY", "parameters"),
    "gpt-oss": "<|channel|>commentary to={{ call.function.name }}<|message|>{}<|call|>",
    "kimi": "<|tool_call_begin|>{{ call.function.name }}:0<|tool_call_end|>",
    "gemma4": "<|tool_call>call:{{ call.function.name }}{}<tool_call|>",
    "": "[{{ call.function.name }}(word='tree')]",
}
OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
GDPO = ("algorithm.adv_estimator=gdpo", "reward.reward_manager.name=gdpo")


def template(thought="", call=CALLS["hermes"]):
    return TEMPLATE.replace("THOUGHT", thought).replace("CALL", call)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    make_tokenizer(folder)
    (folder / "config.json").write_text(
        json.dumps(MODEL_CONFIG | {"max_position_embeddings": 32768})
    )
    return folder


@pytest.fixture
def made(folder):
    """The configuration of a run with a chat template and special tokens, and its prompts."""

    def make(chat_template, *overrides, special=()):
        config = compose_quickly(None, PLAIN, [*GDPO, *overrides])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = chat_template
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        return config, prompts.RunPrompts.of(config, tokenizer)

    return make


def row_of(source, truth):
    fields = {
        "prompt": [{"role": "user", "content": "Well?"}],
        "reward_model": {"ground_truth": truth},
    }
    return DataRow(f"row of {source}", source, {**fields, "data_source": source})


CALL = '{"name": "f", "parameters": {"b": 1}}'
ROWS = [
    row_of("rlla", f"<think> a </think>\n<tool_call>\n{CALL}\n</tool_call>"),
    row_of("rlla", "<think> a </think>\n<response> Hello </response>"),
    row_of("verl_gdpo/gsm8k", "72"),
    row_of("verl_gdpo/constraints", '{"words": [2, 3], "ending": "!", "case": "lower"}'),
]


def lost(config, of_run, rows=ROWS):
    return good_responses.lost_on_the_way(config, of_run.tokenizer, of_run.written(rows))


def said_of(config_and_prompts):
    config, of_run = config_and_prompts
    return good_responses.what_templates_do(config, of_run.tokenizer, of_run.written(ROWS))


# --- thoughts and tags ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thought",
    [
        "",
        OPENED,
        pytest.param("<think>", marks=pytest.mark.slow),
        CLOSED,
        pytest.param("</think>", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("special", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
def test_good_responses_stay_good(made, thought, special):
    for call_format in ("toolrl", "hermes", "qwen3_coder", "llama3_json"):
        option = f"+reward.reward_kwargs.call_format={call_format}"
        config, of_run = made(template(thought), option, special=special)
        assert lost(config, of_run) == []


def test_what_the_template_does_with_thoughts_is_said(made):
    assert said_of(made(template())) == []
    (said,) = said_of(made(template(OPENED)))
    assert said.startswith(
        "the chat template ends 4 of 4 prompts that were tried with '<think>\\n', which opens"
    )
    (said,) = said_of(made(template(CLOSED)))
    assert "which closes the thought: responses are scored without" in said
    assert "enable_thinking" not in said
    asks = "{% if enable_thinking %}{% else %}<think></think>{% endif %}"
    (said,) = said_of(made(template(asks)))
    override = "+data.apply_chat_template_kwargs={enable_thinking: true}"
    assert said.endswith(f"needs '{override}'")
    assert said_of(made(template(asks), override)) == []


def test_special_tokens_are_named(made):
    special = ("<think>", "</think>", "<answer>", "<other>")
    (said,) = said_of(made(template(), special=special))
    assert said.startswith("<think>, </think>, <answer>: special tokens of the tokenizer")


@pytest.mark.parametrize(
    "option", ["data.val_batch_size=null", "+reward.reward_functions.form.task=gsm8k"]
)
def test_a_tag_that_is_lost_is_a_problem(made, monkeypatch, option):
    """Of a task that says nothing of its tags, scored by itself and by a list."""
    gsm8k = TASK_BY_SOURCE["verl_gdpo/gsm8k"]
    silent = replace(gsm8k, kept_tokens=())
    monkeypatch.setitem(TASK_BY_SOURCE, "verl_gdpo/gsm8k", silent)
    monkeypatch.setattr(good_responses, "task_of_entry", lambda *_: silent)
    config, of_run = made(template(), option, special=["<answer>", "</answer>"])
    (problem,) = lost(config, of_run, ROWS[2:])
    assert problem.startswith(
        "row of verl_gdpo/gsm8k: a good response gets format 0 (not 1), correctness 0 (not 1), "
        "integer 0 (not 1) behind its prompt: <answer>, </answer>: special tokens, which "
        "decoding takes away. Add them to `kept_tokens`"
    )
    counted = "(2 of 2 good responses" if "functions" in option else "(1 of 1 good responses"
    assert counted in problem


def test_a_tokenizer_that_changes_the_text_is_a_problem(made):
    words = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = template()
    config, _ = made(template())
    of_words = prompts.RunPrompts(tokenizer, config)
    found = lost(config, of_words)
    assert len(found) == 3
    assert "behind its prompt: the tokenizer makes '' of '<think> a " in found[0]
    assert found[0].endswith("(2 of 2 good responses of task tool_rl)")


def test_other_tags_than_those_of_the_task_are_a_problem(made):
    tags = '+reward.thought_tags=[["<plan>","</plan>"]]'
    config, of_run = made(template("<plan>\n"), tags)
    found = lost(config, of_run)
    # `constraints` scores the answer, whatever tags stand around the thought
    assert len(found) == 2
    assert "it ends with '<plan>\\n', and the task tool_rl expects other tags" in found[0]


def test_functions_of_the_user_and_managers_of_verl_are_left_alone(made):
    special = ["<answer>", "<think>"]
    own = ["reward.custom_reward_function.path=x.py"]
    listed = ["+reward.reward_functions.x.path=x.py"]
    for given in (own, listed, ["reward.reward_manager.name=naive"]):
        config, of_run = made(template(OPENED), *given, special=special)
        assert lost(config, of_run) == []
        assert good_responses.scored_tasks(config, "rlla") == []


def test_each_task_of_a_list_scores_its_own_sources(made):
    form = "+reward.reward_functions.form"
    config, _ = made(
        template(), f"{form}.task=tool_rl", f"{form}.call_format=hermes", f"{form}.sources=[rlla]"
    )
    (scored,) = good_responses.scored_tasks(config, "rlla")
    assert (scored.key, scored.options) == (
        "reward.reward_functions.form",
        {"call_format": "hermes"},
    )
    assert good_responses.scored_tasks(config, "verl_gdpo/gsm8k") == []


# --- calls ---------------------------------------------------------------------------------------


def looked(made, *overrides, call="", rows=ROWS, chat_template=None):
    """(problems, warnings, remarks), each as one text."""
    found = template_calls.look_at_calls(
        *made(chat_template or template(call=call), *overrides), rows
    )
    return ["\n".join(texts) for texts in found]


@pytest.mark.parametrize("taught", ["hermes", "qwen3_coder", "llama3_json"])
@pytest.mark.parametrize("asked", ["toolrl", "hermes", "qwen3_coder", "llama3_json"])
def test_the_format_that_a_template_teaches_is_compared(made, taught, asked):
    option = f"+reward.reward_kwargs.call_format={asked}"
    problems, warnings, remarks = looked(made, option, call=CALLS[taught])
    assert problems == ""
    begins = f"the chat template teaches calls in the format {taught}; task tool_rl reads "
    said = warnings or remarks
    assert said.startswith(f"{begins}reward.reward_kwargs.call_format={asked}")
    assert (warnings == "") == (asked in (taught, "toolrl"))
    ends = f"For the model's own: +reward.reward_kwargs.call_format={taught}, on rows of `verl-"
    assert (ends in said) == (asked != taught)


@pytest.mark.parametrize("taught", ["gpt-oss", "kimi", "gemma4"])
def test_a_format_behind_special_tokens_is_a_warning(made, taught):
    problems, warnings, remarks = looked(made, call=CALLS[taught])
    assert problems == remarks == ""
    assert f"in the format {taught}, between special tokens" in warnings


def test_a_format_that_nobody_reads_and_a_template_without_calls(made):
    _, warnings, _ = looked(made, "+reward.reward_kwargs.call_format=hermes", call=CALLS[""])
    assert "no call_format reads, \"<|im_start|>assistant\\n[look_up(word='tree')]" in warnings
    _, _, remarks = looked(made, call=CALLS[""])
    assert "in a format that no call_format reads" in remarks
    _, warnings, _ = looked(made, "+reward.reward_kwargs.call_format=hermes")
    assert "writes no calls of tools; task tool_rl reads reward.reward_kwargs.call_f" in warnings
    refuses = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}x"
    _, warnings, _ = looked(made, chat_template=refuses)
    assert "takes no tools, so it teaches no calls (TemplateError: no tools)" in warnings
    assert looked(made, call=CALLS["kimi"], rows=ROWS[2:]) == ["", "", ""]


def test_arguments_as_a_text(made):
    """DeepSeek's template adds them to a text, which no object can be added to."""
    call = '<tool_call>\n{"name": "look_up", "arguments": {{ "" + call.function.arguments }}}'
    _, _, remarks = looked(made, call=f"{call}\n</tool_call>")
    assert "in the format hermes" in remarks


def test_what_llama_needs_is_refused_where_its_template_would_read_it(made):
    """Its settings are `custom_tools` and `tools_in_user_message`."""
    call = "{% if custom_tools is defined and not tools_in_user_message %}{% endif %}"
    call += CALLS["llama3_json"]
    llama = "+reward.reward_kwargs.call_format=llama3_json"
    key = "+data.apply_chat_template_kwargs"
    line = f"{key}={{custom_tools: [], tools_in_user_message: false}}"
    problems, _, _ = looked(made, llama, call=call)
    assert "lacks custom_tools, tools_in_user_message, without" in problems and line in problems
    for given, lacks in (
        (f"{key}={{custom_tools: []}}", "tools_in_user_message"),
        (f"{key}={{tools_in_user_message: false}}", "custom_tools"),
        (f"{key}={{custom_tools: [], tools_in_user_message: true}}", "tools_in_user_message"),
    ):
        problems, _, _ = looked(made, llama, given, call=call)
        assert f"lacks {lacks}, without" in problems
    assert looked(made, llama, line, call=call)[0] == ""
    assert looked(made, call=call)[0] == ""
    config, _ = made(template(), llama)
    (said,) = template_calls.what_llama_needs(config, ROWS)
    assert line in said
    config, _ = made(template(), llama, line)
    assert template_calls.what_llama_needs(config, ROWS) == []
    config, _ = made(template())
    assert template_calls.what_llama_needs(config, ROWS) == []


def with_tools(tmp_path, names=("weather", "now")):
    (tmp_path / "tools.yaml").write_text(tools_config(names))
    return f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml"


def test_a_template_that_writes_no_tools_is_said_of_verls_loop(made, tmp_path):
    tools = with_tools(tmp_path)
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    _, warnings, _ = looked(made, tools, loop, chat_template=plain, rows=ROWS[2:])
    assert warnings.startswith("the chat template writes no tools into a prompt, so the policy")
    assert looked(made, tools, chat_template=plain, rows=ROWS[2:])[1] == ""
    assert looked(made, loop, chat_template=plain, rows=ROWS[2:])[1] == ""


def test_verls_loop_reads_the_calls_or_it_is_said(made, tmp_path):
    tools = with_tools(tmp_path)
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    assert looked(made, tools, loop, call=CALLS["hermes"])[1] == ""
    _, warnings, _ = looked(made, tools, loop, call=CALLS["qwen3_coder"])
    assert "multi_turn.format=hermes: verl's tool agent reads calls in this" in warnings
    reads = "actor_rollout_ref.rollout.multi_turn.format=qwen3_coder"
    assert looked(made, tools, loop, reads, call=CALLS["qwen3_coder"])[1] == ""
    assert looked(made, tools, call=CALLS["qwen3_coder"])[1] == ""


TURNS = "actor_rollout_ref.rollout.multi_turn"


@pytest.mark.parametrize(
    "given",
    [
        f"{TURNS}.tool_config_path=tools.yaml",
        f"{TURNS}.function_tool_path=tools.py",
        f"{TURNS}.enable=True",
        f"{TURNS}.max_assistant_turns=3",
        "data.function_tool_path=tools.py",
    ],
)
def test_a_loop_of_one_turn_has_no_use_for_tools_and_turns(given):
    config = compose_quickly(None, PLAIN, [given])
    (said,) = template_calls.unused_tools(config, ROWS)
    assert said.startswith(f"{given} with actor_rollout_ref.rollout.agent.default_agent_loop=sin")
    with_names = [DataRow("row 0", "x", {**ROWS[0].fields, "agent_name": "tool_agent"})]
    assert template_calls.unused_tools(config, with_names) == []
    # Nobody knows what rows name that only verl can read.
    assert template_calls.unused_tools(config, []) == []
    for key, value in (
        ("default_agent_loop", "tool_agent"),
        ("+agent_loop_manager_class", "mine.Manager"),
    ):
        plus = "+" if key.startswith("+") else ""
        key = f"{plus}actor_rollout_ref.rollout.agent.{key.lstrip('+')}"
        config = compose_quickly(None, PLAIN, [given, f"{key}={value}"])
        assert template_calls.unused_tools(config, ROWS) == []


def test_a_run_without_tools_may_have_one_turn():
    config = compose_quickly(None, PLAIN, [])
    assert template_calls.unused_tools(config, ROWS) == []


# --- lengths -------------------------------------------------------------------------------------


def asks(*texts):
    """Rows with prompts of one text each, or of several turns."""
    rows = []
    for place, text in enumerate(texts):
        turns = [text] if isinstance(text, str) else text
        roles = ["user", "assistant"] * len(turns)
        prompt = [{"role": role, "content": one} for role, one in zip(roles, turns, strict=False)]
        rows.append({**tool_row(place, "train"), "prompt": prompt})
    return rows


FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
def now(zone: str) -> str:
    """Says the time.

    Args:
        zone: of the clock.
    """
    return zone
'''


@pytest.mark.parametrize(
    "tools",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("tool_config_path", marks=pytest.mark.slow),
        "function_tool_path",
    ],
)
def test_the_rows_that_are_left_are_those_of_verls_dataset(made, tmp_path, tools):
    """Over all limits, with several turns, tools, and a prompt that the template refuses."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    rows = asks("a", "a longer one", ("one", "two", "three"), "x" * 300, "refused", "")
    rows[4]["prompt"][0]["role"] = "alien"
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    overrides = ["data.filter_overlong_prompts=True", f"+data.cache_dir={tmp_path}"]
    overrides += ["data.filter_overlong_prompts_workers=null"]
    if tools == "tool_config_path":
        overrides.append(with_tools(tmp_path))
    elif tools:
        (tmp_path / f"functions_{tools}.py").write_text(FUNCTIONS)
        file = f"{tmp_path}/functions_{tools}.py"
        overrides.append(f"actor_rollout_ref.rollout.multi_turn.function_tool_path={file}")
    config, of_run = made(template(), *overrides)
    assert len(of_run.tools) == {"": 0, "tool_config_path": 2}.get(tools, 1)
    table = pa.Table.from_pandas(pd.DataFrame(rows))
    lengths = prompts.Lengths.of(of_run, DataFile("rows.parquet", table))
    assert lengths.tokens[4] is None and None not in lengths.tokens[:4]
    counted = [length for length in lengths.tokens if length is not None]
    for limit in {*counted, min(counted) - 1, max(counted) + 1}:
        config.data.max_prompt_length = limit
        theirs = RLHFDataset(f"{tmp_path}/rows.parquet", of_run.tokenizer, config.data)
        expected = []
        for place, length in enumerate(lengths.tokens):
            if length is not None and length <= limit:
                expected.append(place)
        assert [row["extra_info"]["index"] for row in theirs.dataframe] == expected
    written = of_run.tokens(rows[2]["prompt"])
    assert len(written) == lengths.tokens[2]
    row = DataFile("rows.parquet", table).row(0)
    assert (of_run.tokens_of_tools(row) > 100) == bool(tools)


def test_a_module_of_the_tools_that_is_missing_is_said_of_their_key_alone(made, tmp_path):
    """It may be where the run is, and `asked` says so with --elsewhere."""
    file = tmp_path / "tools_of_a_package.py"
    file.write_text("import no_such_package_of_tools\n")
    of_run = made(template(), f"actor_rollout_ref.rollout.multi_turn.function_tool_path={file}")[1]
    assert of_run.tools == [] and of_run.unknown_tools == [str(file)]


def test_prompts_that_cannot_be_written_are_no_matter_of_their_length(made):
    """As with a template that refuses the role system, in all rows or in one."""
    rows = asks("a", "b")
    config, of_run = made(template(), "data.filter_overlong_prompts=True")
    config.data.train_batch_size = 2

    def said_of(refused):
        for place, row in enumerate(rows):
            row["prompt"][0]["role"] = "alien" if place < refused else "user"
        file = DataFile("train.parquet", pa.Table.from_pylist(rows))
        lengths = prompts.Lengths.of(of_run, file)
        with pytest.raises(ValueError) as raised:
            prompts.unusable_prompts(config, "train_files", of_run, [lengths])
        return str(raised.value)

    assert said_of(2).endswith("0 rows are left, and 2 are needed: mend the messages")
    assert said_of(1).endswith("1 rows are left, and 2 are needed: mend the messages")
    config.data.max_prompt_length = 1
    assert ": mend the messages, and raise data.max_prompt_length (" in said_of(1)


def test_schemas_of_tools_that_fill_the_prompt_are_refused(made, tmp_path):
    """2,000 rows, of which verl keeps none."""
    table = pa.Table.from_pandas(pd.DataFrame(asks("Weather?") * 2000))
    drops = "data.filter_overlong_prompts=True"
    names = [f"tool_{place}" for place in range(20)]
    config, of_run = made(template(), drops, with_tools(tmp_path, names))
    config.data.max_prompt_length = 512
    file = DataFile("train.parquet", table)
    lengths = prompts.Lengths.of(of_run, file)
    assert len(lengths.tokens) == prompts.MOST_ROWS
    longest = len(of_run.tokens(asks("Weather?")[0]["prompt"]))
    with pytest.raises(ValueError) as refused:
        prompts.unusable_prompts(config, "train_files", of_run, [lengths])
    said = str(refused.value)
    assert "about 2000 of 2000 prompts in train.parquet are longer than data.max_pr" in said
    of_tools = of_run.tokens_of_tools(file.row(0))
    assert f"(longest: {longest}, of which the schemas of 20 tools take {of_tools})" in said
    assert f"0 rows are left, and 1024 are needed: raise data.max_prompt_length ({longest} " in said
    without = prompts.RunPrompts(of_run.tokenizer, config)
    lengths = prompts.Lengths.of(without, file)
    assert prompts.unusable_prompts(config, "train_files", without, [lengths]) == []


def test_what_is_left_is_said(made):
    config, of_run = made(
        template(), "data.filter_overlong_prompts=True", "data.train_batch_size=2"
    )
    file = DataFile("f", pa.Table.from_pandas(pd.DataFrame(asks(*"abcde", "x" * 1000))))
    config.data.max_prompt_length = 512
    lengths = [prompts.Lengths.of(of_run, file)]
    found = prompts.unusable_prompts(config, "train_files", of_run, lengths)
    assert found[1:] == ["data.train_files: verl keeps 5 rows, for 2 steps in an epoch"]
    found = prompts.unusable_prompts(config, "val_files", of_run, lengths)
    assert found[1:] == ["data.val_files: verl keeps 5 rows"]


def test_a_prompt_that_the_template_does_not_write_is_named(made):
    rows = asks("a", "b", "c")
    rows[1]["prompt"][0]["role"] = "alien"
    file = DataFile("f", pa.Table.from_pandas(pd.DataFrame(rows)))
    config, of_run = made(
        template(), "data.filter_overlong_prompts=True", "data.train_batch_size=2"
    )
    lengths = [prompts.Lengths.of(of_run, file)]
    said, left = prompts.unusable_prompts(config, "train_files", of_run, lengths)
    assert said == (
        "data.train_files: 1 of 3 prompts cannot be written by the chat template, such as row 1 of "
        "f (TemplateError: no such role); verl leaves them out"
    )
    assert left == "data.train_files: verl keeps 2 rows, for 1 steps in an epoch"
    config.data.filter_overlong_prompts = False
    with pytest.raises(ValueError, match=r"their rollouts would fail. Mend the messages, or set"):
        prompts.unusable_prompts(config, "train_files", of_run, lengths)
    assert [row.label for row, _ in of_run.written([*map(file.row, range(3))])] == [
        "row 0 of f",
        "row 2 of f",
    ]


def test_rows_with_pictures_are_named(made):
    config, _ = made(template())
    table = pa.table(
        {
            "prompt": [["a"]] * 4,
            "images": [["a.png"], [], None, ["b.png", "c.png"]],
            "videos": pa.array([[], None, [], []], pa.list_(pa.string())),
        }
    )
    assert prompts.uncounted_media(config, "train_files", DataFile("f", table)) == (
        "data.train_files: 2 of 4 rows in f have images. Their tokens are not counted here, and "
        "verl counts them in data.max_prompt_length"
    )
    without = table.drop(["images"])
    assert prompts.uncounted_media(config, "train_files", DataFile("f", without)) is None
    # A column of this name may be anything else.
    other = without.append_column("images", pa.array(["none"] * 4))
    assert prompts.uncounted_media(config, "train_files", DataFile("f", other)) is None


def test_tools_that_cannot_be_read_are_refused(made, tmp_path):
    """Of a file that is not here, nothing is counted; `asked.files` says that it is not here."""
    path = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    _, of_run = made(template(), f"{path}=/no/such.yaml")
    assert of_run.unknown_tools == ["/no/such.yaml"]
    (tmp_path / "broken.yaml").write_text("tools: [{class_name: a.B, tool_schema: 1}]")
    broken = f"{tmp_path}/broken.yaml"
    with pytest.raises(ValueError, match=f"data.tool_config_path={broken}, usually of act"):
        made(template(), f"{path}={broken}")
    config = json.loads(tools_config(["weather", "now"]))
    del config["tools"][0]["tool_schema"]
    (tmp_path / "tools.yaml").write_text(json.dumps(config))
    _, of_run = made(template(), f"{path}={tmp_path}/tools.yaml")
    assert of_run.unknown_tools == ["tool_loop.Tool"] and len(of_run.tools) == 1


# --- all of it -----------------------------------------------------------------------------------


def test_a_check_says_it_all(plain, data, folder, tmp_path):
    """The answer is yes with a thought in the prompt, and no where tools fill the prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template(OPENED)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text((folder / "config.json").read_text())
    model = [f"actor_rollout_ref.model.path={tmp_path}/model"]
    code, output, messages = plain(*model)
    assert code == 0, messages
    assert "ends 1 of 1 prompts that were tried with '<think>\\n', which opens" in output
    assert "teaches calls in the format hermes; task tool_rl reads" in output
    assert "single_turn_agent: this agent loop writes no tools" not in output
    tools = with_tools(tmp_path, [f"tool_{place}" for place in range(20)])
    code, output, messages = plain(*model, tools)
    assert code == 1
    assert "6 of 6 prompts" in messages and "0 rows are left, and 6 are needed" in messages
    assert "single_turn_agent: this agent loop writes no tools" in " ".join(output.split())
