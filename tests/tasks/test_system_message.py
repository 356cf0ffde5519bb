"""System messages that teach a format of calls. `trl_templates.py` renders real templates."""

import json

import pyarrow.parquet as pq
import pytest

from verl_gdpo.tasks.preparation.prepared_files import parquet_rows
from verl_gdpo.tasks.tool_rl.form import compact_system_prompt, render_answer
from verl_gdpo.tasks.tool_rl.score import TASK, score
from verl_gdpo.tasks.tool_rl.system_message import OUTPUT, OVERRIDES, in_call_format
from verl_gdpo.tools.data import main
from verl_gdpo.tools.evaluate.bfcl.form import prompt

OWN = ["hermes", "qwen3_coder", "llama3_json"]


def toolrls(**parameters):
    """ToolRL's message with one tool, whose parameters are as in rlla_4k."""
    tool = {"name": "f x", "description": "Does é.", "parameters": {"properties": parameters}}
    (message, _) = prompt([tool], [{"role": "user", "content": "?"}], multi_turn=False)
    return message["content"]


def tools_of(message):
    """The tools in a message for hermes, a line of JSON each."""
    lines = in_call_format(message, "hermes").split("<tools>\n")[1].split("\n</tools>")[0]
    return [json.loads(line)["function"] for line in lines.split("\n")]


def parameter(kind, **others):
    return {"description": "", "type": kind, "default": "", **others}


# --- the text -------------------------------------------------------------------------------------

COMPACT = compact_system_prompt({"f": {"a": "integer"}, "g": {}})
F = (
    '{"type": "function", "function": {"name": "f", "parameters": '
    '{"type": "object", "properties": {"a": {"type": "integer"}}}}}'
)
G = F.replace('"f"', '"g"').replace('{"a": {"type": "integer"}}', "{}")


def test_the_message_of_each_format():
    assert in_call_format(COMPACT, "toolrl") == COMPACT
    hermes = in_call_format(COMPACT, "hermes")
    assert hermes.startswith(f"{OUTPUT}\n\n# Tools\n\nYou may call one or more functions")
    assert f"<tools>\n{F}\n{G}\n</tools>\n\nFor each function call" in hermes
    assert hermes.endswith(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    coder = in_call_format(COMPACT, "qwen3_coder")
    assert coder.startswith(
        f"# Tools\n\nYou have access to the following functions:\n\n<tools>\n{F}"
    )
    assert coder.endswith(f"</IMPORTANT>\n\n{OUTPUT}")
    llama = in_call_format(COMPACT, "llama3_json")
    indented = [json.dumps(json.loads(tool), indent=4) for tool in (F, G)]
    assert llama == "\n\n".join([*indented, OUTPUT])


@pytest.mark.parametrize("call_format", OWN)
def test_toolrls_own_words_on_its_format_are_gone_and_the_others_stay(call_format):
    message = in_call_format(toolrls(a=parameter("int")), call_format)
    assert message.count(OUTPUT) == 1
    assert "**Steps for Each Turn**\n1. **Think:** Recall" in message
    assert "You are a helpful multi-turn dialogue assistant" in message
    for gone in ("**Available Tools**", "**Important Notes**", "plaintext", '"Tool name"'):
        assert gone not in message


def test_tools_are_json_schemas_that_say_what_the_row_says():
    (tool,) = tools_of(
        toolrls(
            city=parameter("string", description="Where?"),
            days=parameter("int, optional", default=3),
            at=parameter("List[List[float]]"),
            both=parameter("Tuple[float, float]"),
            more=parameter("dict"),
            call=parameter("Callable[[float], float]"),  # JSON has no such type
            on=parameter("bool, optional", default=False),
        )
    )
    assert tool["name"] == "f x" and tool["description"] == "Does é."
    assert tool["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where?"},
            "days": {"type": "integer", "default": 3},
            "at": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "number"}},
            },
            "both": {"type": "array"},
            "more": {"type": "object"},
            "call": {},
            "on": {"type": "boolean", "default": False},
        },
        "required": ["city", "at", "both", "more", "call"],
    }
    # a row in which nothing is called optional does not say that all is required
    assert "required" not in tools_of(toolrls(a=parameter("int")))[0]["parameters"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Call a tool.", r"got 'Call a tool.'...; expected ToolRL's system message"),
        (toolrls().replace("**Output Format**", ""), r"expected ToolRL's system message"),
        (toolrls().replace("1. Name: ", "2. Name: "), r"tool 1: got the line .*expected 1. Name: "),
        (
            toolrls().replace("Parameters: {}", "Params: {}"),
            r"tool 1: got the line 'Params: {}'; expected Parameters: ",
        ),
        (toolrls().replace("\nParameters: {}", ""), r"tool 1: got 2 lines; expected 3"),
        (
            toolrls().replace("Parameters: {}", "Parameters: ["),
            r"tool 1: got '\['; expected its par",
        ),
        (toolrls(a=[]), r"tool 'f x', parameter 'a': got \[\]; expected an object"),
        ("Tools:\nf", r"tool 1: got ''; expected its parameters, an object"),
    ],
)
def test_another_message_is_refused(message, words):
    with pytest.raises(ValueError, match=words):
        in_call_format(message, "hermes")


# --- the command ----------------------------------------------------------------------------------

CALL = {"name": "f x", "parameters": {"a": 1}}
TRUTH = render_answer("t", [CALL])


def files(folder):
    """Rows of the same tool in ToolRL's JSON, and in verl's form as a parquet file."""
    system = toolrls(a=parameter("int"))
    items = [{"instruction": system, "input": f"Do {i}.", "output": TRUTH} for i in range(50)]
    (folder / "rows.json").write_text(json.dumps(items))
    assert main(["tool_rl", "--from", f"{folder}/rows.json", "--out", f"{folder}/plain"]) == 0
    return folder / "rows.json", folder / "plain" / "train.parquet"


@pytest.mark.parametrize(
    "call_format", ["hermes", *(pytest.param(name, marks=pytest.mark.slow) for name in OWN[1:])]
)
def test_rows_of_each_source_teach_the_format(tmp_path, capsys, call_format):
    of_json, of_verl = files(tmp_path)
    plain = list(parquet_rows(of_verl))
    for place, source in enumerate(
        [
            ["--from", str(of_json)],
            ["--from", str(of_verl), "--test", str(of_verl)],
            ["--synthetic"],
        ]
    ):
        capsys.readouterr()
        out = tmp_path / str(place)
        command = ["tool_rl", *source, "--out", str(out)]
        assert main([*command, "--call-format", call_format]) == 0
        assert f"a run on these rows needs {OVERRIDES[call_format]}\n" in capsys.readouterr().out
        rows = list(parquet_rows(out / "train.parquet"))
        for row in rows:
            system, *_ = row["prompt"]
            assert system["role"] == "system" and OUTPUT in system["content"]
            truth = row["reward_model"]["ground_truth"]
            assert score(truth, truth)["format"] == 1.0  # which stays ToolRL's
            good = TASK.good_response_of(truth, {"call_format": call_format})
            assert score(good, truth, call_format=call_format)["format"] == 1.0
        if source[0] == "--from":
            assert [row["reward_model"] for row in rows] == [row["reward_model"] for row in plain]
            assert [row["prompt"][1:] for row in rows] == [row["prompt"][1:] for row in plain]
        # the same command finds its files, and one without the option does not
        assert main([*command, "--call-format", call_format, "--if-needed"]) == 0
        assert "up to date" in capsys.readouterr().out
        assert main([*command, "--if-needed"]) == 0
        assert f"--call-format {call_format}` made" in capsys.readouterr().err


def test_without_the_option_nothing_is_different(tmp_path, capsys):
    of_json, of_verl = files(tmp_path)
    command = ["tool_rl", "--from", str(of_json), "--out", f"{tmp_path}/same"]
    assert main([*command, "--call-format", "toolrl"]) == 0
    assert "a run on these rows needs" not in capsys.readouterr().out
    ours, theirs = (pq.read_table(path) for path in (tmp_path / "same" / "train.parquet", of_verl))
    assert ours.to_pylist() == theirs.to_pylist()


def test_rows_without_tools_are_named(tmp_path, capsys):
    system = [{"role": "system", "content": "Call."}]
    user = [{"role": "user", "content": "?"}]
    rows = []
    for number, messages in enumerate([system + user, user, [], "?", None]):
        rows.append(
            {
                "data_source": "rlla",
                "prompt": messages,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": TRUTH},
                "extra_info": {"index": number, "split": "train"},
            }
        )
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = ["tool_rl", "--from", f"{tmp_path}/rows.json", "--out", f"{tmp_path}/out"]
    assert main([*command, "--call-format", "hermes"]) == 1
    said = capsys.readouterr().err
    assert "has 5 bad rows" in said
    assert (
        "row 0, field prompt[0].content: got 'Call.'...; expected ToolRL's system message" in said
    )
    assert "row 1, field prompt[0]: got {'role': 'user'" in said
    for number in (2, 3, 4):
        assert f"row {number}, field prompt[0]: got None; expected a system message" in said


def test_an_unknown_format_is_wrong_usage(tmp_path, capsys):
    command = ["tool_rl", "--synthetic", "--out", str(tmp_path / "out"), "--call-format", "glm"]
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "'toolrl', 'hermes', 'qwen3_coder', 'llama3_json'" in capsys.readouterr().err
