"""Tools and calls with the templates that TRL ships. Only `nox -s trl` runs it."""

from importlib.resources import files

import pytest
from byte_tokenizer import make_tokenizer
from transformers import AutoTokenizer
from trl.chat_template_utils import add_response_schema, parse_response

from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.tool_rl import system_message
from verl_gdpo.tasks.tool_rl.form import render_answer
from verl_gdpo.tasks.tool_rl.rows import make_rows
from verl_gdpo.tasks.tool_rl.taught_format import format_of, written_call
from verl_gdpo.tools.evaluate.bfcl.form import prompt
from verl_gdpo.trl_rewards import reward_funcs

TEMPLATES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_5_nothink": "qwen3_coder",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
}
# of those that no reader knows, and of those that write no calls
OTHERS = {
    "gptoss": "gpt-oss",
    "gemma4": "gemma4",
    "glm4moe": "",
    "lfm2_v2": "",
    "deepseek_r1_distill": "",
    "llama3": "",
}
TOOLS = [
    {
        "name": "get weather/v1.0",
        "description": "Says 'how' \"it\" <is> & will be, in °C.\u2028",
        "parameters": {
            "properties": {
                "city": {"description": "Where?", "type": "string", "default": ""},
                "days": {"description": "How many?", "type": "int, optional", "default": 3},
                "at": {"description": "Hours.", "type": "List[int]", "default": [6, 18]},
            }
        },
    },
    {"name": "now", "description": "", "parameters": {}},
]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)

    def of_template(name):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.bos_token = "<s>"
        tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
        template = files("trl") / "chat_templates" / f"{name}.jinja"
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        return tokenizer

    return of_template


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_row_has_the_tokens_that_the_template_writes_for_its_tools(tokenizer_of, name):
    tokenizer, call_format = tokenizer_of(name), TEMPLATES[name]
    given, of_row = {}, {}
    if call_format == "llama3_json":
        # Llama 3.2's template asks for today's date, unless it is given
        given = {"tools_in_user_message": False, "date_string": "26 Jul 2024"}
        of_row = {**given, "custom_tools": []}
    question = {"role": "user", "content": "Weather in Oslo?"}
    (toolrls, _) = prompt(TOOLS, [question], multi_turn=False)
    listed, instructions = system_message._parts(toolrls["content"])
    synthetic = [row["prompt"][0]["content"] for row in make_rows(3, split="train", seed=1)]
    cases = [(toolrls["content"], system_message._listed_tools(listed), instructions)]
    for message in synthetic:
        cases.append((message, system_message._compact_tools(message), system_message.OUTPUT))
    for message, tools, instructions in cases:
        plain = [{"role": "system", "content": instructions}, question]
        expected = tokenizer.apply_chat_template(
            plain, tools=tools, add_generation_prompt=True, return_dict=False, **given
        )
        taught = system_message.in_call_format(message, call_format)
        row = [{"role": "system", "content": taught}, question]
        ours = tokenizer.apply_chat_template(
            row, add_generation_prompt=True, return_dict=False, **of_row
        )
        assert ours == expected and len(ours) > 500


@pytest.mark.parametrize("name", TEMPLATES | OTHERS)
def test_the_format_is_the_one_that_the_template_writes(tokenizer_of, name):
    """So `verl-gdpo check` names it."""
    tokenizer = tokenizer_of(name)

    def render(messages, tools):
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

    assert format_of(written_call(render)) == (TEMPLATES | OTHERS)[name]


ONE = {"name": "f", "parameters": {"a": 1, "b": "two words"}}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen3_5_think", "llama3_1"])
@pytest.mark.parametrize("calls", [[ONE], [ONE, {"name": "g", "parameters": {}}]])
def test_what_trl_reads_scores_as_the_text(tokenizer_of, name, calls):
    """The message that TRL hands to a reward function: of a right, a wrong and a cut response.

    TRL closes a call in XML that was cut off, so that nothing says any more that it was.
    """
    tokenizer, call_format = tokenizer_of(name), TEMPLATES[name]
    tokenizer = add_response_schema(tokenizer)
    truth = render_answer("I call.", calls)
    good = TASKS["tool_rl"].good_response_of(truth, {"call_format": call_format})
    functions = reward_funcs(TASKS["tool_rl"], call_format=call_format)
    prefix = tokenizer.encode("<|im_start|>assistant\n")
    cut = good[:-20]
    for text in (good, good.replace("two", "2"), cut):
        ids = tokenizer.encode(text)
        read = parse_response(tokenizer, [*ids, tokenizer.eos_token_id], prefix=prefix)
        batch = {"completion_ids": [ids] * 2, "data_source": ["rlla"] * 2}
        batch["reward_model"] = [{"ground_truth": truth}] * 2
        for function in functions:
            if text == cut and call_format == "qwen3_coder" and function.__name__ == "format":
                continue
            of_message, of_text = function(completions=[[read], text], **batch)
            assert of_message == of_text, (function.__name__, text, read)
