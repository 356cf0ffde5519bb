"""Makes a response ready for scoring: what of it is the policy's own, its thought, its answer.

    prompt    ...<|im_start|>assistant\n<think>\n     its end opens the thought
    policy    A tool knows. </think> <tool_call>...   a turn: thought, then answer
    tool      ...<|im_start|>assistant\n              its text, with the header of the next turn
    policy    It is 4.                                the last turn, which has the answer

What the prompt has already of a turn's thought is read from the end of the prompt's own tokens, and
for later turns from the end of the header before them. The name of a model says nothing: one chat
template opens the thought, closes it or leaves it to the policy, as it is told to.

The thought of a turn ends at its first closing tag, with or without an opening tag before it.
Servers such as vLLM's `deepseek_r1` cut there too, so what follows is what a user is shown. verl's
parser `deepseek_v4` takes the last closing tag. In training, a policy could then hide an answer
that it regrets: it would only have to write the tag once more behind it.

Text of the policy that nothing closes is thought if the prompt or the policy has opened one, and
answer otherwise. A stop string that cuts the closing tag closes nothing.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

from omegaconf import OmegaConf

from verl_gdpo.scoring.signatures import keywords_of

KEY = "reward.thought_tags"
# What follows the thought, and the thought, as reward functions may take them.
PARTS = ("answer_str", "reasoning_str")
# The keyword of a task's scorer; see `Task.scores`.
CLOSED_THOUGHT = "closed_thought"
# White space, in tokens, that may stand around the tags at the end of a prompt.
ROOM_FOR_SPACE = 16


class Tags(NamedTuple):
    """A pair of tags, between which a model thinks."""

    opening: str
    closing: str


# DeepSeek-R1, Qwen3, GLM-4.5 and most others; Seed-OSS; Magistral.
TAGS: tuple[Tags, ...] = (
    Tags("<think>", "</think>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("[THINK]", "[/THINK]"),
)


def thought_tags(config: Any) -> tuple[Tags, ...]:
    """Return the pairs of tags of a run: those of `reward.thought_tags`, or else `TAGS`.

    Raises:
        ValueError: the key has no pairs of texts; the message says what to write.
    """
    written = OmegaConf.select(config, KEY)
    if written is None:
        return TAGS
    # Not by `algorithm.read_settings`, which loads torch: `evaluate --help` should not wait for it.
    if OmegaConf.is_config(written):
        written = OmegaConf.to_container(written, resolve=True)
    if not isinstance(written, list) or not written or not all(map(_is_pair, written)):
        raise ValueError(
            f"{KEY}={written}: expected a list of pairs, an opening and a closing tag, which "
            f'differ and have no white space around them: \'+{KEY}=[["<think>","</think>"]]\''
        )
    return tuple(Tags(*pair) for pair in written)


def _is_pair(pair: Any) -> bool:
    """Return whether these can be an opening and a closing tag."""
    if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
        return False
    return all(isinstance(tag, str) and tag != "" and tag == tag.strip() for tag in pair)


@dataclass(frozen=True)
class Turn:
    r"""A turn of the policy.

    text: what the policy wrote itself, without the tools' text.
    given: what stands of its thought right before it: "" for nothing, "<think>\n" where the prompt
        opens the thought, "<think>\n\n</think>\n\n" where it closes it.
    """

    text: str
    given: str = ""

    def parts(self, tags: Sequence[Tags] = TAGS) -> "Parts":
        r"""Return thought and answer. White space on both sides of a closing tag belongs to none.

        >>> Turn("2 + 2\n</think>\n\nIt is 4. ", given="<think>\n").parts()
        Parts(reasoning='2 + 2', answer='It is 4. ')
        """
        pair = _pair_at_end(self.given, tags) or _first_pair(self.text, tags)
        if pair is None:
            return Parts("", self.text)
        thought, closing, answer = self.text.partition(pair.closing)
        is_opened = self.given.rstrip().endswith(pair.opening) or pair.opening in thought
        if not closing and not is_opened:
            return Parts("", self.text)
        # A model that finds the opening tag in its prompt may write it once more.
        reasoning = thought.strip().removeprefix(pair.opening).strip()
        return Parts(reasoning, answer.lstrip())

    def is_closed_before(self, tags: Sequence[Tags] = TAGS) -> bool:
        """Return whether the prompt, or the header of the turn, has closed the thought."""
        return any(self.given.rstrip().endswith(pair.closing) for pair in tags)


class Parts(NamedTuple):
    """What `Turn.parts` returns."""

    reasoning: str
    answer: str


def _pair_at_end(text: str, tags: Iterable[Tags]) -> Tags | None:
    """Return the pair of which a tag ends the text, but for white space."""
    stripped = text.rstrip()
    for pair in tags:
        if stripped.endswith((pair.opening, pair.closing)):
            return pair
    return None


def _first_pair(text: str, tags: Iterable[Tags]) -> Tags | None:
    """Return the pair of which a tag stands first in the text; None if there is no tag."""
    first = None
    first_place = len(text)
    for pair in tags:
        for tag in pair:
            # What stands behind the first tag so far is not searched.
            place = text.find(tag, 0, first_place)
            if place >= 0:
                first = pair
                first_place = place
    return first


def given_thought(before: str, tags: Sequence[Tags] = TAGS) -> str:
    r"""Return the end of a prompt from the tag on that opens the thought of the turn behind it.

    >>> given_thought("Why?<|im_end|>\n<|im_start|>assistant\n<think>\n")
    '<think>\n'
    >>> given_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    '<think>\n\n</think>\n\n'
    >>> given_thought("Write <think> first.<|im_end|>\n<|im_start|>assistant\n")
    ''

    Args:
        before: the prompt, or its end. Special tokens are a part of it.
    """
    pair = _pair_at_end(before, tags)
    if pair is None:
        return ""
    stripped = before.rstrip()
    if stripped.endswith(pair.opening):
        return before[len(stripped) - len(pair.opening) :]
    start_of_closing = len(stripped) - len(pair.closing)
    start = stripped.rfind(pair.opening, 0, start_of_closing)
    # Some templates write the closing tag alone, and no other text may stand between the two.
    if start < 0 or stripped[start + len(pair.opening) : start_of_closing].strip():
        start = start_of_closing
    return before[start:]


@dataclass(frozen=True)
class Response:
    """A response, ready for scoring.

    turns: of the policy, at least one.
    generated_tokens: how many tokens the policy wrote itself. A dump's `trained_tokens` are fewer
        where a trainer rejects some, which happens later.
    """

    turns: tuple[Turn, ...]
    generated_tokens: int
    tags: tuple[Tags, ...] = TAGS

    @cached_property
    def _parts(self) -> list[Parts]:
        return [turn.parts(self.tags) for turn in self.turns]

    @property
    def answer(self) -> str:
        """The answer of the last turn: what follows its thought, "" if that does not end."""
        return self._parts[-1].answer

    @property
    def reasoning(self) -> str:
        """The thoughts of all turns, with an empty line between two of them."""
        return "\n\n".join(parts.reasoning for parts in self._parts if parts.reasoning)

    @property
    def text(self) -> str:
        """What the policy wrote, as if it had written the tags that opened its thoughts.

        Turns stand on lines of their own, and without what tools wrote between them.
        """
        texts = []
        for turn in self.turns:
            is_closed = turn.is_closed_before(self.tags)
            texts.append(turn.text if is_closed else turn.given + turn.text)
        return "\n".join(texts)

    @property
    def is_closed_in_prompt(self) -> bool:
        """Whether the prompt has closed the thought, so that none is asked for."""
        return self.turns[0].is_closed_before(self.tags)

    def for_dump(self, decoded: str) -> dict[str, Any] | None:
        """Return what a dump keeps of a response, as JSON can hold it.

        It is None where the response is the text that verl itself decodes and dumps. This text is
        not kept twice: a turn that has it, behind a tag that the prompt opens, has None.

        Args:
            decoded: this text.
        """
        if self.turns == (Turn(decoded),) and self.tags == TAGS:
            return None
        turns: list[list[str | None]] = []
        for turn in self.turns:
            if turn.text == decoded:
                turns.append([turn.given, None])
            else:
                turns.append([turn.given, turn.text])
        kept: dict[str, Any] = {"turns": turns, "generated_tokens": self.generated_tokens}
        if self.tags != TAGS:
            kept["tags"] = [list(pair) for pair in self.tags]
        return kept

    @classmethod
    def of_dump(
        cls, kept: Mapping[str, Any] | None, output: str, response_tokens: int | None
    ) -> "Response":
        """Return the response of a row in a dump.

        Args:
            kept: what `for_dump` returned.
            output: the text that verl dumped.
            response_tokens: of the row; None if it is not known, which counts as 0.
        """
        # Then the response is what verl dumped, and nothing was kept beside it.
        if kept is None:
            return cls((Turn(output),), response_tokens or 0)
        turns = []
        for given, text in kept["turns"]:
            turns.append(Turn(output if text is None else text, given))
        tags = TAGS
        if "tags" in kept:
            tags = tuple(Tags(*pair) for pair in kept["tags"])
        return cls(tuple(turns), kept["generated_tokens"], tags)


class ScoresResponses(Protocol):
    """What of a task says how a response is scored; see `Task`."""

    @property
    def score(self) -> Callable[..., Any]: ...

    @property
    def scores(self) -> Literal["response", "answer"]: ...


def arguments_for(task: ScoresResponses, response: Response) -> tuple[str, dict[str, Any]]:
    """Return the text that a task scores, and what its scorer is told of the response beside it.

    The second are keywords, and the first goes by position: a scorer may name it as it likes.
    """
    text = response.text
    if task.scores == "answer":
        text = response.answer
    keywords = {}
    taken, _ = keywords_of(task.score)
    # Most scorers have no argument for it, and would raise a TypeError.
    if CLOSED_THOUGHT in taken:
        keywords[CLOSED_THOUGHT] = response.is_closed_in_prompt
    return text, keywords


def parts_taken_by(function: Any) -> list[str]:
    """Return which of `PARTS` a custom reward function names."""
    # verl keeps the function of the user, and the options for it, as the first two arguments.
    if isinstance(function, functools.partial) and function.args:
        function = function.args[0]
    try:
        names, _ = keywords_of(function)
    except (TypeError, ValueError):
        # Some functions that are written in C tell nothing of their arguments.
        return []
    return [name for name in PARTS if name in names]


def runs_of(mask: Iterable[int]) -> list[int]:
    """Return the lengths of the runs of a response mask: the policy's, others', the policy's, ...

    >>> runs_of([1, 1, 1, 0, 0, 1])
    [3, 2, 1]
    >>> runs_of([0, 1])
    [0, 1, 1]
    """
    lengths: list[int] = []
    for is_own, run in groupby(map(bool, mask)):
        if not lengths and not is_own:
            lengths.append(0)
        lengths.append(sum(1 for _ in run))
    return lengths


class ResponseReader:
    """Reads the responses of a run from their tokens.

    A tokenizer decodes with and without special tokens. If `<think>` or `<tool_call>` is one, the
    first leaves the end of a turn in the text, and the second takes the tag away. Here these tags
    stay, and no other special token does.
    """

    def __init__(self, tokenizer: Any, tags: Sequence[Tags] = TAGS) -> None:
        self.tokenizer = tokenizer
        self.tags = tuple(tags)
        self._special = _special_tokens(tokenizer)
        longest = max(len(f"{pair.opening}{pair.closing}".encode()) for pair in self.tags)
        # A token is a byte at least, but for those of white space.
        self._end_tokens = longest + ROOM_FOR_SPACE

    def read(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        runs: Sequence[int] | None = None,
        *,
        kept: Iterable[str] = (),
        decoded: str | None = None,
    ) -> Response:
        """Return a response, ready for scoring.

        Args:
            prompt_ids: the tokens of the prompt, without padding.
            response_ids: those of the response, without padding.
            runs: of the response's mask, see `runs_of`; None if all tokens are the policy's.
            kept: tags that stay in the text if they are special tokens, besides those of thoughts.
            decoded: the whole response without special tokens, where it is known already.
        """
        if runs is None:
            runs = [len(response_ids)]
        # Runs of another length would take text of a tool for the policy's.
        if sum(runs) != len(response_ids):
            raise ValueError(
                f"response mask: got {sum(runs)} tokens; expected those of the response, "
                f"{len(response_ids)}"
            )
        keep = set(kept)
        for pair in self.tags:
            keep.update(pair)
        dropped = {number for number, text in self._special.items() if text not in keep}
        kept_ids = self._special.keys() - dropped

        def decode(ids: Sequence[int]) -> str:
            # Without such a tag, the tokenizer's own flag gives the text that verl dumps.
            if kept_ids.isdisjoint(ids):
                return str(self.tokenizer.decode(ids, skip_special_tokens=True))
            left = [number for number in ids if number not in dropped]
            return str(self.tokenizer.decode(left, skip_special_tokens=False))

        given = given_thought(self._end_of(prompt_ids), self.tags)
        # To decode the thousands of tokens of a lone turn again would give the same text.
        if len(runs) == 1 and decoded is not None and kept_ids.isdisjoint(response_ids):
            turns = [Turn(decoded, given)]
        else:
            turns = self._turns(given, response_ids, runs, dropped, decode)
        return Response(tuple(turns), sum(runs[::2]), self.tags)

    def _turns(
        self,
        given: str,
        response_ids: Sequence[int],
        runs: Sequence[int],
        dropped: set[int],
        decode: Callable[[Sequence[int]], str],
    ) -> list[Turn]:
        """Return the turns of the policy. Those of others end one only with a header.

        Text that stands within a turn, as of a search engine within a thought, has no special
        tokens. It neither opens nor closes a thought, whatever it writes.
        """
        turns: list[Turn] = []
        is_new = True
        has_ended = False
        start = 0
        for place, length in enumerate(runs):
            ids = response_ids[start : start + length]
            start += length
            is_own = place % 2 == 0
            if not is_own:
                if has_ended or not dropped.isdisjoint(ids):
                    is_new = True
                    given = given_thought(self._end_of(_after_last(ids, dropped)), self.tags)
                continue
            if length == 0:
                # An agent loop may begin a response with tokens of its own.
                continue
            text = decode(ids)
            if is_new:
                turns.append(Turn(text, given))
            else:
                turns[-1] = Turn(turns[-1].text + text, turns[-1].given)
            is_new = False
            # The token that ends a turn is the policy's own, and a special one.
            has_ended = ids[-1] in dropped
        return turns or [Turn("", given)]

    def _end_of(self, ids: Sequence[int]) -> str:
        """Return the last tokens as text, in which special tokens are seen."""
        if len(ids) == 0:
            return ""
        return str(self.tokenizer.decode(ids[-self._end_tokens :], skip_special_tokens=False))


def _after_last(ids: Sequence[int], dropped: set[int]) -> Sequence[int]:
    """Return the tokens behind the last special one, which a tool cannot have written."""
    for place in range(len(ids) - 1, -1, -1):
        if ids[place] in dropped:
            return ids[place + 1 :]
    return ids[:0]


def _special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Return {id: text} of the tokens that decoding without special tokens takes away."""
    special = {}
    named = zip(
        getattr(tokenizer, "all_special_ids", ()),
        getattr(tokenizer, "all_special_tokens", ()),
        strict=True,
    )
    for number, text in named:
        special[number] = str(text)
    # Fast tokenizers also take away those that have no role, such as the end of the sequence.
    for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            special[number] = str(token.content)
    return special
