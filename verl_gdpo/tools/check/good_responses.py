"""Sends the good response of each task the way that a rollout goes: as tokens, behind its prompt.

The prompt may end within a thought, and the tokenizer may lose a tag or change a text. The score
of a response that is known to be good shows both before the first rollout does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_gdpo.hooks.configuration import has_own_scorer, uses_gdpo_manager
from verl_gdpo.scoring.function_list import KEY, entries_of, options_of_entry, task_of_entry
from verl_gdpo.scoring.response import (
    Response,
    ResponseReader,
    Tags,
    Turn,
    arguments_for,
    given_thought,
    thought_tags,
)
from verl_gdpo.tasks import TASK_BY_SOURCE, Task, options_for
from verl_gdpo.tasks.tool_rl.taught_format import first_difference
from verl_gdpo.tools.check.prompts import PromptOfRow

SHOWN = 60  # characters of a text, in a message


@dataclass(frozen=True)
class ScoredTask:
    """A task that scores rows of a run.

    key: under which its options are written.
    kept_tokens: tags that stay in a response if they are special tokens, besides those of thoughts.
    """

    task: Task
    options: Mapping[str, Any]
    key: str
    kept_tokens: Sequence[str]

    def rewards(
        self, response: Response, ground_truth: str, response_tokens: int
    ) -> dict[str, float | None]:
        text, told = arguments_for(self.task, response)
        rewards = self.task.score(
            text, ground_truth, response_tokens=response_tokens, **told, **self.options
        )
        return dict(rewards)


def scored_tasks(config: Any, source: str) -> list[ScoredTask]:
    """Return the tasks that score rows of a data source, through gdpo's reward manager."""
    if not uses_gdpo_manager(config):
        return []
    if not has_own_scorer(config):
        task = TASK_BY_SOURCE.get(source)
        if task is None:
            return []
        options = options_for(source, dict(config.reward.get("reward_kwargs") or {}))
        return [ScoredTask(task, options, "reward.reward_kwargs", task.kept_tokens)]
    of_list = {}
    kept: list[str] = []
    for name, entry in entries_of(config).items():
        if entry.get("task"):
            of_list[name] = task_of_entry(f"{KEY}.{name}", entry)
            kept.extend(of_list[name].kept_tokens)
    scored = []
    for name, task in of_list.items():
        entry = entries_of(config)[name]
        if entry["sources"] is None or source in entry["sources"]:
            scored.append(ScoredTask(task, options_of_entry(entry), f"{KEY}.{name}", kept))
    return scored


def what_templates_do(config: Any, tokenizer: Any, prompts: Sequence[PromptOfRow]) -> list[str]:
    """Return remarks: what of a thought stands in the prompts, and which tags are special tokens.

    Raises:
        ValueError: `reward.thought_tags` has no pairs of tags.
    """
    tags = thought_tags(config)
    counts: dict[str, int] = {}
    names = [tag for pair in tags for tag in pair]
    for row, ids in prompts:
        given = given_thought(tokenizer.decode(ids), tags)
        counts[given] = counts.get(given, 0) + 1
        for scored in scored_tasks(config, row.source):
            names.extend(scored.kept_tokens)
    remarks = []
    for given, count in counts.items():
        if given:
            of_prompts = f"{count} of {len(prompts)} prompts"
            remarks.append(_of_thought(given, tags, of_prompts, tokenizer))
    special = special_tokens(tokenizer)
    seen = [tag for tag in dict.fromkeys(names) if tag in special]
    if seen:
        remarks.append(
            f"{', '.join(seen)}: special tokens of the tokenizer. Tasks see them, and answer_str "
            "and reasoning_str are read with them. solution_str, which functions of yours and "
            "verl's own scorers get, and `output` in verl's dump do not have them"
        )
    return remarks


def _of_thought(given: str, tags: Sequence[Tags], of_prompts: str, tokenizer: Any) -> str:
    is_closed = Turn("", given).is_closed_before(tags)
    begins = f"the chat template ends {of_prompts} that were tried with {given!r}"
    if not is_closed:
        return (
            f"{begins}, which opens the thought: responses are scored as if they had written this "
            "themselves, and one that does not close the thought has no answer"
        )
    remark = (
        f"{begins}, which closes the thought: responses are scored without thoughts, and `format` "
        "asks for all but the thought"
    )
    if "enable_thinking" in tokenizer.get_chat_template():
        remark += (
            ". A model that should think needs "
            "'+data.apply_chat_template_kwargs={enable_thinking: true}'"
        )
    return remark


def lost_on_the_way(config: Any, tokenizer: Any, prompts: Sequence[PromptOfRow]) -> list[str]:
    """Return a problem for each task whose good response scores lower once it was tokens."""
    reader = ResponseReader(tokenizer, thought_tags(config))
    tried: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        if not isinstance(prompt.row.truth, str):
            continue
        for scored in scored_tasks(config, prompt.row.source):
            name = scored.task.name
            tried[name] = tried.get(name, 0) + 1
            problem = _problem_of(prompt, scored, reader)
            if problem:
                found.setdefault(name, []).append(problem)
    return [
        f"{problems[0]} ({len(problems)} of {tried[name]} good responses of task {name})"
        for name, problems in found.items()
    ]


def _problem_of(prompt: PromptOfRow, scored: ScoredTask, reader: ResponseReader) -> str:
    """Return what a good response loses, and what to set; "" if it loses nothing."""
    tokenizer = reader.tokenizer
    truth = prompt.row.truth
    good = scored.task.good_response_of(truth, scored.options)
    given = given_thought(tokenizer.decode(prompt.ids), reader.tags)
    written = as_the_policy_writes(good, given, reader.tags)
    ids = tokenizer.encode(written, add_special_tokens=False)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    read = reader.read(prompt.ids, ids, kept=scored.kept_tokens)
    meant = Response((Turn(good),), len(ids), reader.tags)
    if arguments_for(scored.task, read) == arguments_for(scored.task, meant):
        # Scoring takes time where it runs programs.
        return ""
    before = scored.rewards(meant, truth, len(ids))
    after = scored.rewards(read, truth, len(ids))
    lower = [name for name in before if (after[name] or 0.0) < (before[name] or 0.0)]
    if not lower:
        return ""
    rewards = ", ".join(f"{name} {after[name]:g} (not {before[name]:g})" for name in lower)
    why = _why(tokenizer, scored, given, written, read)
    return f"{prompt.row.label}: a good response gets {rewards} behind its prompt: {why}"


def as_the_policy_writes(good: str, given: str, tags: Sequence[Tags]) -> str:
    r"""Return a good response without what the prompt has already of its thought.

    >>> as_the_policy_writes("<think> x </think>\nyes", "<think>\n", [Tags("<think>", "</think>")])
    ' x </think>\nyes'

    Args:
        given: see `Turn`.
    """
    for pair in tags:
        if given.rstrip().endswith(pair.opening):
            if good.startswith(pair.opening):
                return good.removeprefix(pair.opening)
            if pair.closing in good:
                return good
            return f"{pair.closing}\n\n{good}"
        if given.rstrip().endswith(pair.closing) and good.startswith(pair.opening):
            return good.partition(pair.closing)[2].lstrip()
    return good


def _why(tokenizer: Any, scored: ScoredTask, given: str, written: str, read: Response) -> str:
    """Say what the way of a response has changed, and what to set."""
    kept = {tag for pair in read.tags for tag in pair} | set(scored.kept_tokens)
    lost = [token for token in special_tokens(tokenizer) if token in written and token not in kept]
    if lost:
        return (
            f"{', '.join(lost)}: special tokens, which decoding takes away. Add them to "
            f"`kept_tokens` of the task {scored.task.name}, or set `special` to false in "
            "tokenizer.json and tokenizer_config.json"
        )
    came_back = read.turns[0].text
    if came_back != written:
        place = first_difference(written, came_back)
        return (
            f"the tokenizer makes {came_back[place:][:SHOWN]!r} of {written[place:][:SHOWN]!r}. It "
            "has no tokens for this text, or changes it on the way (clean_up_tokenization_spaces "
            "in tokenizer_config.json)"
        )
    return (
        f"it ends with {given!r}, and the task {scored.task.name} expects other tags. Take a "
        "template that writes nothing of the thought: "
        "actor_rollout_ref.model.custom_chat_template"
    )


def special_tokens(tokenizer: Any) -> list[str]:
    """Return what decoding without special tokens takes away."""
    added = tokenizer.added_tokens_decoder.values()
    return [str(token.content) for token in added if token.special]
