"""Thought and answer of a response: each rule, from texts and from tokens."""

import json
import time

import pytest
from byte_tokenizer import make_tokenizer
from omegaconf import OmegaConf
from transformers import AddedToken, AutoTokenizer

from verl_gdpo.scoring.response import (
    TAGS,
    Parts,
    Response,
    ResponseReader,
    Tags,
    Turn,
    given_thought,
    runs_of,
    thought_tags,
)

OPENED = "<think>\n"
CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("given", "text", "reasoning", "answer"),
    [
        ("", "It is 4.", "", "It is 4."),
        ("", "  It is 4.\n", "", "  It is 4.\n"),
        ("", "<think> 2 + 2 </think>\nIt is 4.", "2 + 2", "It is 4."),
        # A lone closing tag ends what stands before it, where the prompt is not known.
        ("", "2 + 2 </think> It is 4.", "2 + 2", "It is 4."),
        ("", "Well. <think> 2 + 2 </think> It is 4.", "Well. <think> 2 + 2", "It is 4."),
        # Opened and unfinished.
        ("", "<think> It is 4.", "It is 4.", ""),
        ("", "It is 4. <think> Or 5?", "It is 4. <think> Or 5?", ""),
        (OPENED, "It is 4.", "It is 4.", ""),
        (OPENED, "", "", ""),
        # The prompt opens it.
        (OPENED, "2 + 2\n</think>\n\nIt is 4.", "2 + 2", "It is 4."),
        (OPENED, "<think>\n2 + 2\n</think>\n\nIt is 4.", "2 + 2", "It is 4."),
        (OPENED, "</think>It is 4.", "", "It is 4."),
        # The prompt closes it.
        (CLOSED, "It is 4.", "", "It is 4."),
        ("</think>", "It is 4.", "", "It is 4."),
        (CLOSED, "<think> 2 + 2 </think> It is 4.", "2 + 2", "It is 4."),
        (CLOSED, "<think> It is 4.", "It is 4.", ""),
        # Of several closing tags, the first.
        ("", "<think> a </think> 4 </think> 5", "a", "4 </think> 5"),
        (OPENED, "a </think> 4 <think> b </think> 5", "a", "4 <think> b </think> 5"),
        # A stop string cuts the closing tag, or leaves nothing of it.
        ("", "<think> a </thi", "a </thi", ""),
        (OPENED, "a </think", "a </think", ""),
        (OPENED, "a <", "a <", ""),
        ("", "It is 4. </think", "", "It is 4. </think"),
        # Other pairs: the one of which a tag stands first.
        ("", "[THINK]a[/THINK]4 </think> 5", "a", "4 </think> 5"),
        ("", "<seed:think>a </think> b</seed:think>4", "a </think> b", "4"),
        ("<seed:think>", "a </think> b", "a </think> b", ""),
        ("", "a </think> 4 [THINK] b [/THINK] 5", "a", "4 [THINK] b [/THINK] 5"),
    ],
)
def test_thought_and_answer(given, text, reasoning, answer):
    assert Turn(text, given).parts() == Parts(reasoning, answer)


def test_a_pair_of_tags_of_the_users_own_is_the_only_one():
    own = [Tags("<plan>", "</plan>")]
    assert Turn("<plan> a </plan> 4 </think>").parts(own) == Parts("a", "4 </think>")
    assert Turn("<think> a </think> 4").parts(own) == Parts("", "<think> a </think> 4")
    assert given_thought("Go: <plan> ", own) == "<plan> "
    assert given_thought("Go: <think> ", own) == ""


@pytest.mark.parametrize(
    ("before", "given"),
    [
        ("<|im_start|>assistant\n", ""),
        ("", ""),
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|Assistant|><think>", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", CLOSED),
        ("<|Assistant|></think>", "</think>"),
        # A thought of an earlier turn is none of this one's.
        ("<think> a </think>4<|im_end|><|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<think> a </think>", "</think>"),
        ("Put it between <think> and </think>.<|im_start|>assistant\n", ""),
    ],
)
def test_what_the_end_of_a_prompt_has_of_the_thought(before, given):
    assert given_thought(before) == given


def test_the_text_is_that_of_the_policy_with_the_tag_that_the_prompt_has_opened():
    turns = (Turn("a </think> call", OPENED), Turn("b </think> 4", OPENED))
    response = Response(turns, 9)
    assert response.text == "<think>\na </think> call\n<think>\nb </think> 4"
    assert (response.reasoning, response.answer) == ("a\n\nb", "4")
    assert not response.is_closed_in_prompt
    closed = Response((Turn("4", CLOSED),), 1)
    assert (closed.text, closed.is_closed_in_prompt) == ("4", True)
    assert Response((Turn("4"),), 1).text == "4"


def test_a_dump_keeps_what_was_scored():
    turns = (Turn("a </think> call", OPENED), Turn("4"))
    for response in (Response(turns, 9), Response(turns, 9, (Tags("<a>", "</a>"),))):
        kept = json.loads(json.dumps(response.for_dump("a </think> call4")))
        assert Response.of_dump(kept, "any", 12) == response
    opened = Response((Turn("a</think>4", OPENED),), 9)
    assert opened.for_dump("a</think>4")["turns"] == [[OPENED, None]]
    assert Response.of_dump(opened.for_dump("a</think>4"), "a</think>4", 9) == opened
    ordinary = Response((Turn("<think>a</think>4"),), 9)
    assert ordinary.for_dump("<think>a</think>4") is None
    assert Response.of_dump(None, "<think>a</think>4", 9) == ordinary
    # The text alone does not tell the tags of the user's own.
    assert Response(ordinary.turns, 9, (Tags("<a>", "</a>"),)).for_dump("<think>a</think>4")
    assert Response((Turn("4", CLOSED),), 1).for_dump("4") is not None


# --- from tokens --------------------------------------------------------------------------------


class Token:
    def __init__(self, content, special):
        self.content = content
        self.special = special


class Tokenizer:
    """One token a character, and one for each of these texts, of which `special` are special."""

    TEXTS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")

    def __init__(self, *special):
        self.added_tokens_decoder = {}
        for place, text in enumerate(self.TEXTS):
            is_special = text.startswith("<|") or text in special
            self.added_tokens_decoder[place] = Token(text, is_special)

    def encode(self, text):
        ids = []
        while text:
            for number, token in self.added_tokens_decoder.items():
                if text.startswith(token.content):
                    ids.append(number)
                    text = text[len(token.content) :]
                    break
            else:
                ids.append(ord(text[0]) + 1000)
                text = text[1:]
        return ids

    def decode(self, ids, skip_special_tokens):
        texts = []
        for number in ids:
            token = self.added_tokens_decoder.get(number)
            if token is None:
                texts.append(chr(number - 1000))
            elif not (token.special and skip_special_tokens):
                texts.append(token.content)
        return "".join(texts)


HEADER = "<|im_start|>assistant\n"


def read(prompt, *pieces, special=(), **more):
    """Read a response of pieces, the first, third, ... of which are the policy's."""
    tokenizer = Tokenizer(*special)
    prompt_ids = tokenizer.encode(prompt)
    runs = [tokenizer.encode(piece) for piece in pieces]
    ids = [number for run in runs for number in run]
    lengths = [len(run) for run in runs]
    return ResponseReader(tokenizer).read(prompt_ids, ids, lengths, **more)


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_tags_are_read_also_where_they_are_special_tokens(special):
    written = read(HEADER, "<think> a </think>4<|im_end|>", special=special)
    assert (written.reasoning, written.answer) == ("a", "4")
    assert written.text == "<think> a </think>4"
    opened = read(f"Why?{HEADER}<think>\n", "a </think>4<|im_end|>", special=special)
    assert (opened.reasoning, opened.answer) == ("a", "4")
    assert opened.text == "<think>\na </think>4"
    closed = read(f"Why?{HEADER}{CLOSED}", "4<|im_end|>", special=special)
    assert (closed.reasoning, closed.answer, closed.is_closed_in_prompt) == ("", "4", True)


def test_special_tokens_of_the_call_format_stay_and_no_others():
    text = "<think> a </think><tool_call>f</tool_call><|im_end|>"
    special = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    assert read(HEADER, text, special=special).answer == "f"
    kept = ("<tool_call>", "</tool_call>")
    assert read(HEADER, text, special=special, kept=kept).answer == "<tool_call>f</tool_call>"


def test_a_text_without_kept_special_tokens_is_what_verl_decodes():
    """Nothing is decoded twice, so an ordinary response stays as it is, to the byte."""
    reader = ResponseReader(Tokenizer("<tool_call>"))
    ids = reader.tokenizer.encode("4<|im_end|>")
    assert reader.read([], ids, kept=("<tool_call>",), decoded="verl's").answer == "verl's"
    assert reader.read([], ids).answer == "4"
    with_call = reader.tokenizer.encode("<tool_call>4<|im_end|>")
    kept = reader.read([], with_call, kept=("<tool_call>",), decoded="verl's")
    assert kept.answer == "<tool_call>4"


def test_a_tokenizer_of_transformers(tmp_path):
    """One that takes away special tokens of no role too, as `<think>` of some models is."""
    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tags = [AddedToken(tag, special=True) for tag in ("<think>", "</think>", "<tool_call>")]
    tokenizer.add_tokens([*tags, AddedToken("<turn>", special=True)])
    text = "<think> \u00e4 </think>\n<tool_call> 4<turn><eos>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == " \u00e4 \n 4"
    prompt = tokenizer.encode("Why?<turn>")
    response = ResponseReader(tokenizer).read(prompt, ids, kept=["<tool_call>"])
    assert response.text == "<think> \u00e4 </think>\n<tool_call> 4"
    assert (response.reasoning, response.answer) == ("\u00e4", "<tool_call> 4")
    opened = ResponseReader(tokenizer).read(tokenizer.encode("Why?<turn><think>\n"), ids[1:])
    assert (opened.text, opened.answer) == ("<think>\n \u00e4 </think>\n 4", "4")


def test_the_answer_is_that_of_the_last_turn():
    header = f"18 degrees<|im_end|>{HEADER}"
    response = read(HEADER, "<think> a </think>call<|im_end|>", header, "It is 18.<|im_end|>")
    assert (response.reasoning, response.answer) == ("a", "It is 18.")
    assert response.text == "<think> a </think>call\nIt is 18."
    assert response.generated_tokens == 20


def test_the_header_before_a_turn_opens_its_thought():
    header = f"18<|im_end|>{HEADER}<think>\n"
    unfinished = read(f"{HEADER}<think>\n", "a </think>call<|im_end|>", header, "It is 18.")
    assert (unfinished.reasoning, unfinished.answer) == ("a\n\nIt is 18.", "")
    finished = read(f"{HEADER}<think>\n", "a </think>call<|im_end|>", header, "b </think>18.")
    assert (finished.reasoning, finished.answer) == ("a\n\nb", "18.")
    # The first turn's unfinished thought ends with the turn.
    first = read(f"{HEADER}<think>\n", "a<|im_end|>", f"18<|im_end|>{HEADER}", "It is 18.")
    assert (first.reasoning, first.answer) == ("a", "It is 18.")


@pytest.mark.parametrize("said", ["b </think> 5", "<think> b", "</think>", "<think>"])
def test_a_tools_text_is_neither_thought_nor_answer(said):
    header = f"{said}<|im_end|>{HEADER}"
    for ending in ("<|im_end|>", ""):
        response = read(HEADER, f"<think> a </think>call{ending}", header, "It is 18.")
        assert (response.reasoning, response.answer) == ("a", "It is 18.")
    # Within a turn, the thought goes on behind the tool's text, also where that has the tags.
    inline = read(HEADER, "<think> a search", said, " c </think>18")
    assert (inline.reasoning, inline.answer) == ("a search c", "18")
    unfinished = read(HEADER, "<think> a search", said, " c")
    assert (unfinished.reasoning, unfinished.answer) == ("a search c", "")
    answered = read(HEADER, "a </think>It", said, " is 18.")
    assert (answered.reasoning, answered.answer) == ("a", "It is 18.")
    # A loop that writes no header: the policy's own end of turn ends it too.
    bare = read(HEADER, "<think> a<|im_end|>", said, "It is 18.")
    assert (bare.reasoning, bare.answer) == ("a", "It is 18.")
    # A rollout that ends with a tool's text.
    last = read(HEADER, "<think> a </think>call<|im_end|>", header)
    assert (last.reasoning, last.answer, last.generated_tokens) == ("a", "call", 10)


def test_a_response_that_begins_with_others_tokens_or_has_none_of_the_policy():
    late = read(f"{HEADER}<think>\n", "", "Hint.", "a </think>4")
    assert (late.text, late.answer) == ("<think>\na </think>4", "4")
    for pieces in ([], ["", "Hint."]):
        empty = read(HEADER, *pieces)
        assert (empty.reasoning, empty.answer, empty.text, empty.generated_tokens) == (
            "",
            "",
            "",
            0,
        )


def test_only_the_end_of_a_prompt_is_decoded():
    prompt = "x" * 10**6
    tokenizer = Tokenizer()
    seen = []
    real = tokenizer.decode
    tokenizer.decode = lambda ids, **options: seen.append(len(ids)) or real(ids, **options)
    end = tokenizer.encode(HEADER + CLOSED)
    reader = ResponseReader(tokenizer)
    response = reader.read([*[1120] * len(prompt), *end], tokenizer.encode("4"))
    assert response.is_closed_in_prompt
    assert max(seen) < 100


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="got 3 tokens; expected those of the response, 2"):
        ResponseReader(Tokenizer()).read([], [1100, 1100], [2, 1])


def test_runs_of_a_mask():
    assert runs_of([]) == []
    assert runs_of([1.0, 1.0]) == [2]
    assert runs_of([0, 0, 1, 0]) == [0, 2, 1, 1]


# --- the key ------------------------------------------------------------------------------------


def test_the_key_takes_the_place_of_the_table():
    assert thought_tags(OmegaConf.create({"reward": {}})) == TAGS
    written = OmegaConf.create({"reward": {"thought_tags": [["<a>", "</a>"]]}})
    assert thought_tags(written) == (Tags("<a>", "</a>"),)


@pytest.mark.parametrize(
    "written", [[], "x", [["<a>"]], [["<a>", ""]], [["<a>", "<a>"]], [["<a>", " </a>"]], [[1, 2]]]
)
def test_a_key_without_pairs_is_refused(written):
    config = OmegaConf.create({"reward": {"thought_tags": written}})
    with pytest.raises(ValueError, match=r"^reward\.thought_tags=.*: expected a list of pairs"):
        thought_tags(config)


# --- hostile texts ------------------------------------------------------------------------------

MANY = 300_000


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * (MANY // 7),
        "</think>" * (MANY // 8),
        "<think></think>" * (MANY // 15),
        "<" * MANY,
        " " * MANY,
        "<think>" + " " * MANY,
        "[THINK]<seed:think>" * (MANY // 19),
    ],
)
def test_hostile_texts_take_linear_time(text):
    """A quadratic search of them takes minutes."""
    start = time.process_time()
    for given in ("", OPENED, CLOSED, text):
        Turn(text, given).parts()
    given_thought(text)
    given_thought(text + "</think>")
    assert time.process_time() - start < 1.0
