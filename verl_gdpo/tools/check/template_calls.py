"""Says which format of calls a run's chat template teaches, and whether a task and verl read it."""

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.tasks import options_of
from verl_gdpo.tasks.tool_rl.call_formats import BEHIND_SPECIAL_TOKENS, TOOLRL
from verl_gdpo.tasks.tool_rl.system_message import LLAMA_OVERRIDE, LLAMA_SETTINGS
from verl_gdpo.tasks.tool_rl.taught_format import format_of, written_call
from verl_gdpo.tools.check.data_files import DataRow
from verl_gdpo.tools.check.good_responses import ScoredTask, scored_tasks
from verl_gdpo.tools.check.prompts import RunPrompts

SHOWN = 200  # characters of a call, in a message
OPTION = "call_format"
LLAMA = "llama3_json"
ROLLOUT = "actor_rollout_ref.rollout"
SINGLE_TURN = "single_turn_agent"
# what has no effect in a loop of one turn
OF_MORE_TURNS = (
    f"{ROLLOUT}.multi_turn.tool_config_path",
    f"{ROLLOUT}.multi_turn.function_tool_path",
    f"{ROLLOUT}.multi_turn.enable",
    f"{ROLLOUT}.multi_turn.max_assistant_turns",
    f"{ROLLOUT}.multi_turn.max_user_turns",
    "data.tool_config_path",
    "data.function_tool_path",
)


def look_at_calls(
    config: Any, prompts: RunPrompts, rows: Sequence[DataRow]
) -> tuple[list[str], list[str], list[str]]:
    """Return problems, warnings and remarks on the format of calls."""
    reading: dict[str, ScoredTask] = {}
    for row in rows:
        for scored in scored_tasks(config, row.source):
            if OPTION in options_of(scored.task):
                reading[scored.key] = scored
    if not reading and not prompts.tools:
        return [], [], []
    try:
        written = written_call(prompts.text_without_header)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return [], [f"the chat template takes no tools, so it teaches no calls ({reason})"], []
    taught = format_of(written)
    problems = []
    warnings = []
    remarks = []
    for scored in reading.values():
        asked = scored.options.get(OPTION, TOOLRL)
        if asked == LLAMA:
            problems += _what_llama_lacks(prompts)
        text = _of_task(scored, asked, taught, written)
        if asked in (TOOLRL, taught) and taught not in BEHIND_SPECIAL_TOKENS:
            remarks.append(text)
        else:
            warnings.append(text)
    if prompts.tools:
        warnings += _of_verls_loop(config, prompts, taught, rows)
    return problems, warnings, remarks


def _of_task(scored: ScoredTask, asked: str, taught: str, written: str) -> str:
    """Say whether the task reads what the template teaches."""
    key = f"{scored.key}.{OPTION}"
    runs_with = f"task {scored.task.name} reads {key}={asked}"
    if not written:
        text = f"the chat template writes no calls of tools; {runs_with}"
        if asked == TOOLRL:
            return f"{text}, which the prompts of the rows teach"
        return f"{text}. The rows have to teach it: take {TOOLRL} where they are ToolRL's"
    if taught in BEHIND_SPECIAL_TOKENS:
        return (
            f"the chat template teaches calls in the format {taught}, between special tokens, "
            f"which a response loses before it is scored; {runs_with}. A model of this format "
            "writes its thoughts and answers between such tokens too: take another model"
        )
    if not taught:
        return (
            f"the chat template teaches calls in a format that no {OPTION} reads, "
            f"{written[:SHOWN]!r}; {runs_with}"
        )
    if taught == asked:
        return f"the chat template teaches calls in the format {taught}; {runs_with}"
    text = f"the chat template teaches calls in the format {taught}; {runs_with}"
    if asked == TOOLRL:
        text += ", which the prompts of the rows teach"
    return (
        f"{text}. For the model's own: +{key}={taught}, on rows of `verl-gdpo data "
        f"{scored.task.name} --call-format {taught}`"
    )


def _what_llama_lacks(prompts: RunPrompts) -> list[str]:
    """Name the settings without which Llama's template writes other prompts than with tools."""
    options = prompts.template_options
    missing = []
    for name, value in LLAMA_SETTINGS.items():
        is_read = name in prompts.tokenizer.get_chat_template()
        if is_read and options.get(name) != value:
            missing.append(name)
    if not missing:
        return []
    return [
        f"{OPTION}={LLAMA}: data.apply_chat_template_kwargs lacks {', '.join(missing)}, without "
        "which the chat template does not write all that Llama learned to see with tools. Set "
        f"{LLAMA_OVERRIDE}"
    ]


def what_llama_needs(config: Any, rows: Sequence[DataRow]) -> list[str]:
    """Name the settings that Llama's template needs, where nobody can look into a template."""
    options = config.data.get("apply_chat_template_kwargs") or {}
    if all(name in options for name in LLAMA_SETTINGS):
        return []
    for row in rows:
        for scored in scored_tasks(config, row.source):
            if scored.options.get(OPTION) == LLAMA:
                return [f"{OPTION}={LLAMA}: the chat template of Llama 3 needs {LLAMA_OVERRIDE}"]
    return []


def unused_tools(config: Any, rows: Sequence[DataRow]) -> list[str]:
    """Say where verl's agent loop has one turn alone, although tools or more turns are set.

    `multi_turn.enable` chooses no loop: verl.trainer.ppo.v1.agent_loop_tq takes that of each row,
    and the default for rows that name none.
    """
    agent = config.actor_rollout_ref.rollout.agent
    has_own_manager = bool(agent.get("agent_loop_manager_class"))
    if agent.default_agent_loop != SINGLE_TURN or has_own_manager or not rows:
        return []
    if any("agent_name" in row.fields for row in rows):
        return []
    for key in OF_MORE_TURNS:
        value = OmegaConf.select(config, key)
        if value:
            return [
                f"{key}={value} with {ROLLOUT}.agent.default_agent_loop={SINGLE_TURN}: this agent "
                "loop writes no tools into a prompt, calls none, and ends after one turn, and no "
                f"row names another. Set {ROLLOUT}.agent.default_agent_loop=tool_agent, or let "
                "each row name its loop in the column agent_name"
            ]
    return []


def _of_verls_loop(
    config: Any, prompts: RunPrompts, taught: str, rows: Sequence[DataRow]
) -> list[str]:
    """Say where verl's agent loop reads other calls than those taught, or no tools are written."""
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    names_loop = any("agent_name" in row.fields for row in rows)
    if loop == SINGLE_TURN and not names_loop:
        return []  # It reads no calls, which `unused_tools` says.
    if not _writes_tools(prompts):
        return [
            "the chat template writes no tools into a prompt, so the policy knows of none unless "
            "the rows describe them. Take a model whose template writes tools, or set "
            "actor_rollout_ref.model.custom_chat_template"
        ]
    reads = OmegaConf.select(config, f"{ROLLOUT}.multi_turn.format")
    if taught and taught != reads:
        return [
            f"{ROLLOUT}.multi_turn.format={reads}: verl's tool agent reads calls in this format, "
            f"and the chat template teaches {taught}. Set it to {taught}"
        ]
    return []


def _writes_tools(prompts: RunPrompts) -> bool:
    """Return whether the tools of the run change what the chat template writes."""
    plain = [{"role": "user", "content": "a"}]
    try:
        without = prompts.text_without_header(plain)
        return prompts.text_without_header(plain, prompts.tools) != without
    except Exception:
        # A template may raise whatever it likes for messages that it does not know.
        return True
