"""What the messages of prompts say that is rarely meant: roles, and marks of a chat template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_gdpo.tools.check.data_files import DataFile, rows_of
from verl_gdpo.tools.check.good_responses import special_tokens
from verl_gdpo.tools.check.prompts import Messages, RunPrompts

# What templates write around a message, and hardly anybody in one.
MARKS = (
    *("<|im_start|>", "<|im_end|>"),  # Qwen, ChatML
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),  # Llama 3
    *("[INST]", "[/INST]", "<<SYS>>"),  # Mistral, Llama 2
    *("<start_of_turn>", "<end_of_turn>"),  # Gemma
    *("<|system|>", "<|user|>", "<|assistant|>"),  # Phi, GLM, Zephyr
    *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),  # DeepSeek
    *("<|start|>", "<|message|>"),  # gpt-oss
)

# What is said of the prompts of a file; `detail` is that of the first one.
ANSWERED = (
    "{count} end with a message of the assistant, such as {first}: verl writes it into the prompt, "
    "and asks for one more answer. If it is the right answer, the policy reads it. Leave it out: "
    "the answer stands in reward_model.ground_truth"
)
NO_QUESTION = (
    "{count} have no message of the role user, such as {first}, which has: {detail}. Many chat "
    "templates refuse or leave out other roles: name the role of the question user"
)
SYSTEM_LAST = (
    "{count} end with a message of the role system, such as {first}: the policy would answer this "
    "message instead of the question. Put it first"
)
TEMPLATED = (
    "{count} have marks of a chat template already, such as {detail} in {first}: verl puts the "
    "model's template around each message, so these would be templated twice. Put the plain texts "
    "into the messages, each with its role"
)


def rarely_meant(
    config: Any, key: str, files: Sequence[DataFile], marks: Sequence[str]
) -> list[str]:
    """Return a remark for each file of `data.<key>`, and each kind of prompts rarely meant.

    Args:
        marks: see `marks_of`.
    """
    column = config.data.prompt_key
    pattern = re.compile("|".join(map(re.escape, marks)))
    remarks = []
    for file in files:
        # {what is said: the rows}, and {what is said: the detail of the first row}
        found: dict[str, list[int]] = {}
        details: dict[str, str] = {}
        for number, row in enumerate(rows_of(file.table, column)):
            for what, detail in _oddities(row[column], pattern):
                found.setdefault(what, []).append(number)
                details.setdefault(what, detail)
        for what, numbers in found.items():
            count = f"{len(numbers)} of {file.table.num_rows} prompts"
            first = file.row(numbers[0]).label
            remarks.append(
                f"data.{key}: {what.format(count=count, first=first, detail=details[what])}"
            )
    return remarks


def _oddities(messages: Messages, marks: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return (what is said of a prompt, a detail) of each of its oddities."""
    if not messages:
        return []
    found = []
    roles = [str(message["role"]) for message in messages]
    if roles[-1] == "assistant":
        found.append((ANSWERED, ""))
    elif "user" not in roles:
        found.append((NO_QUESTION, ", ".join(dict.fromkeys(roles))))
    elif roles[-1] == "system":
        found.append((SYSTEM_LAST, ""))
    for message in messages:
        mark = marks.search(text_of(message["content"]))
        if mark:
            found.append((TEMPLATED, mark[0]))
            break
    return found


def text_of(content: Any) -> str:
    """Return the text of a message, whose content may have parts.

    >>> text_of([{"type": "image"}, {"type": "text", "text": "What is it?"}])
    'What is it?'
    """
    if isinstance(content, str):
        return content
    texts = []
    if isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping) and part.get("text"):
                texts.append(str(part["text"]))
    return "\n".join(texts)


def marks_of(of_run: RunPrompts | None) -> list[str]:
    """Return the marks of usual templates, and the special tokens that the run's template writes.

    It is asked for plain messages: the special token of a picture may well stand in a text.
    """
    marks = [*MARKS]
    if of_run is None:
        return marks
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        written = of_run.text_without_header(plain)
    except Exception:
        # A template may raise whatever it likes for messages that it does not know.
        return marks
    for token in special_tokens(of_run.tokenizer):
        if token in written:
            marks.append(token)
    return marks
