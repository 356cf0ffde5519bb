"""The prompts of a run: what its tokenizer, chat template and tools make, and how long that is.

Prompts are counted by the filter of verl's own dataset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from transformers import AutoTokenizer

from verl_gdpo.tools.check.data_files import DataFile, DataRow, evenly
from verl_gdpo.tools.check.verl_questions import count_tokens, tool_schemas

# So many rows of a file are counted, evenly spread: it takes a second, where 50,000 take a minute.
MOST_ROWS = 1000
# What a tokenizer may lack, by whether verl can pad with its tokens.
LACKS = {
    False: "neither an eos_token nor a pad_token: name the token that ends an answer as eos_token "
    "in tokenizer_config.json",
    True: "no chat template: put chat_template.jinja beside it, or set "
    "actor_rollout_ref.model.custom_chat_template",
}

Messages = Sequence[Mapping[str, Any]]


def tokenizer_of_run(config: Any) -> Any:
    """Return the tokenizer of the policy; None if it is not on this machine."""
    model = config.actor_rollout_ref.model
    path = str(model.get("tokenizer_path") or model.path)
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=bool(model.get("trust_remote_code"))
        )
    except (OSError, ValueError):
        return None


class PromptOfRow(NamedTuple):
    """A row, and its prompt in tokens."""

    row: DataRow
    ids: list[int]


@dataclass(frozen=True)
class RunPrompts:
    """What makes a prompt of a row.

    tokenizer: with the chat template of the run.
    tools: schemas of the tools that verl's dataset counts in each prompt.
    unknown_tools: classes of tools whose schema no file has.
    """

    tokenizer: Any
    config: Any
    tools: Sequence[Mapping[str, Any]] = ()
    unknown_tools: Sequence[str] = ()

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> "RunPrompts":
        """Return what makes the prompts of a run.

        Raises:
            ValueError: every prompt would fail with this tokenizer, or the tools cannot be read.
        """
        model = config.actor_rollout_ref.model
        if model.get("custom_chat_template"):
            tokenizer.chat_template = model.custom_chat_template
        has_end = tokenizer.eos_token_id is not None or tokenizer.pad_token_id is not None
        if not has_end or not tokenizer.chat_template:
            path = model.get("tokenizer_path") or model.path
            raise ValueError(
                f"{path}: every prompt would fail, because its tokenizer has {LACKS[has_end]}"
            )
        tools, unknown = tool_schemas(config)
        return cls(tokenizer, config, tools, unknown)

    @property
    def template_options(self) -> dict[str, Any]:
        """`data.apply_chat_template_kwargs`."""
        return dict(self.config.data.get("apply_chat_template_kwargs") or {})

    def text_without_header(self, messages: Messages, tools: Sequence[Any] = ()) -> str:
        """Return what the chat template writes for some messages, without the next one's header."""
        options = self.template_options
        options.update(tokenize=False, add_generation_prompt=False)
        options["tools"] = list(tools) or None
        return str(self.tokenizer.apply_chat_template(messages, **options))

    def tokens(self, messages: Messages) -> list[int]:
        """Return the prompt of some messages, with the run's tools, in tokens."""
        options = self.template_options
        options.update(tokenize=True, add_generation_prompt=True, return_dict=False)
        options["tools"] = list(self.tools) or None
        ids: list[int] = self.tokenizer.apply_chat_template(messages, **options)
        return ids

    def messages_of(self, row: DataRow) -> Messages:
        messages: Messages = row.fields[self.config.data.prompt_key]
        return messages

    def written(self, rows: Sequence[DataRow]) -> list["PromptOfRow"]:
        """Return the prompts of these rows, but for those that the chat template does not write."""
        prompts = []
        for row in rows:
            try:
                ids = self.tokens(self.messages_of(row))
            except Exception:
                # A template may raise whatever it likes for messages that it does not know.
                continue
            prompts.append(PromptOfRow(row, ids))
        return prompts

    def tokens_of_tools(self, row: DataRow) -> int:
        """Return how many tokens of a row's prompt the schemas of tools take."""
        without = RunPrompts(self.tokenizer, self.config)
        messages = self.messages_of(row)
        return len(self.tokens(messages)) - len(without.tokens(messages))


@dataclass(frozen=True)
class Lengths:
    """The prompts of up to `MOST_ROWS` rows of a file.

    places: of these rows in the file.
    tokens: of each prompt; None where the chat template does not write it.
    """

    file: DataFile
    places: Sequence[int]
    tokens: Sequence[int | None]

    @classmethod
    def of(cls, prompts: RunPrompts, file: DataFile) -> "Lengths":
        places = evenly(file.table.num_rows, MOST_ROWS)
        rows = file.table.take(places).to_pylist()
        counted = count_tokens(prompts.config, prompts.tokenizer, prompts.tools, rows)
        return cls(file, places, counted)

    def rows_in_file(self, count: int) -> int:
        """Return how many rows of the file these are, as far as the counted rows tell."""
        return round(count * int(self.file.table.num_rows) / len(self.places))

    @property
    def about(self) -> str:
        """A word before a number of `rows_in_file`."""
        return "" if len(self.places) == self.file.table.num_rows else "about "

    @property
    def longest(self) -> int:
        written = [tokens for tokens in self.tokens if tokens is not None]
        return max(written, default=0)

    def count_longer(self, limit: int) -> int:
        """Return how many of the counted prompts are longer than a limit."""
        return sum(tokens is not None and tokens > limit for tokens in self.tokens)

    @property
    def first_unwritten(self) -> DataRow | None:
        """The first row whose prompt the chat template does not write."""
        if None not in self.tokens:
            return None
        return self.file.row(self.places[self.tokens.index(None)])


def uncounted_media(config: Any, key: str, file: DataFile) -> str | None:
    """Return a line on rows of `data.<key>` with pictures, videos or sound; None if none has any.

    Only the processor of the model knows how many tokens they take.
    """
    columns = [config.data.get(f"{kind}_key") for kind in ("image", "video", "audio")]
    counts = []
    for column in columns:
        if column not in file.table.column_names:
            continue
        values = file.table[column]
        if not pa.types.is_list(values.type) and not pa.types.is_large_list(values.type):
            continue
        filled = pc.sum(pc.greater(pc.list_value_length(values), 0)).as_py()
        if filled:
            counts.append(f"{filled} of {file.table.num_rows} rows in {file.path} have {column}")
    if not counts:
        return None
    return (
        f"data.{key}: {'; '.join(counts)}. Their tokens are not counted here, and verl counts them "
        "in data.max_prompt_length"
    )


def unusable_prompts(
    config: Any, key: str, prompts: RunPrompts, lengths: Sequence[Lengths]
) -> list[str]:
    """Return a remark for each file of `data.<key>` in which verl drops or cuts prompts.

    Raises:
        ValueError: verl drops so many that fewer rows than one batch are left, or cuts all; or
            rollouts of some would fail.
    """
    limit = config.data.max_prompt_length
    drops = config.data.get("filter_overlong_prompts", False)
    remarks = []
    left = 0
    whole = 0
    longest = 0
    for of_file in lengths:
        unwritten = of_file.tokens.count(None)
        longer = of_file.count_longer(limit)
        of_file_left = of_file.rows_in_file(len(of_file.tokens) - unwritten - longer)
        whole += of_file_left
        if drops:
            left += of_file_left
        else:
            left += of_file.file.table.num_rows
        longest = max(longest, of_file.longest)
        if unwritten:
            remarks.append(_unwritten(key, prompts, of_file))
        if longer:
            remarks.append(_too_long(key, prompts, of_file, longer))
    if not remarks:
        return []
    said = "; ".join(remarks)
    if not drops and any(None in of_file.tokens for of_file in lengths):
        raise ValueError(f"{said}. Mend the messages, or set data.filter_overlong_prompts=True")
    least = config.data.train_batch_size if key == "train_files" else 1
    remedies = []
    if any(None in of_file.tokens for of_file in lengths):
        remedies.append("mend the messages")
    if any(of_file.count_longer(limit) for of_file in lengths):
        shorter = f"raise data.max_prompt_length ({longest} keeps all), or use shorter prompts"
        if prompts.tools:
            shorter += ", or fewer and shorter descriptions of tools"
        remedies.append(shorter)
    how = ", and ".join(remedies)
    if left < least:
        raise ValueError(f"{said}. {left} rows are left, and {least} are needed: {how}")
    if not whole:
        raise ValueError(f"{said}. No prompt is whole: {how}")
    if drops:
        remarks.append(_what_is_left(config, key, left, lengths))
    return remarks


def _too_long(key: str, prompts: RunPrompts, lengths: Lengths, longer: int) -> str:
    config = prompts.config
    file = lengths.file
    of_tools = ""
    if prompts.tools:
        row = file.row(lengths.places[lengths.tokens.index(lengths.longest)])
        of_tools = (
            f", of which the schemas of {len(prompts.tools)} tools take "
            f"{prompts.tokens_of_tools(row)}"
        )
    what_verl_does = "cuts off their beginnings"
    if config.data.get("filter_overlong_prompts", False):
        what_verl_does = "leaves them out"
    return (
        f"data.{key}: {lengths.about}{lengths.rows_in_file(longer)} of {file.table.num_rows} "
        f"prompts in {file.path} are longer than data.max_prompt_length="
        f"{config.data.max_prompt_length} tokens (longest: {lengths.longest}{of_tools}); "
        f"verl {what_verl_does}"
    )


def _unwritten(key: str, prompts: RunPrompts, lengths: Lengths) -> str:
    row = lengths.first_unwritten
    assert row is not None
    try:
        prompts.tokens(prompts.messages_of(row))
        reason = "in the filter of verl's dataset alone"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    what_follows = "their rollouts would fail"
    if prompts.config.data.get("filter_overlong_prompts", False):
        what_follows = "verl leaves them out"
    unwritten = lengths.rows_in_file(lengths.tokens.count(None))
    return (
        f"data.{key}: {lengths.about}{unwritten} of {lengths.file.table.num_rows} prompts cannot "
        f"be written by the chat template, such as {row.label} ({reason}); {what_follows}"
    )


def _what_is_left(config: Any, key: str, left: int, lengths: Sequence[Lengths]) -> str:
    about = "".join({of_file.about for of_file in lengths})
    text = f"data.{key}: verl keeps {about}{left} rows"
    if key != "train_files":
        return text
    return f"{text}, for {left // config.data.train_batch_size} steps in an epoch"
