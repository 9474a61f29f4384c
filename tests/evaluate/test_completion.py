"""Text from tokens: split characters, stop strings across tokens, the end of a document."""

from __future__ import annotations

import pytest

from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.errors import UserError
from tlm_jax.evaluate.completion import Completion

TOKENIZER = ByteTokenizer()


class Pieces:
    """A tokenizer whose tokens are the given pieces; the last id is the end of a document."""

    prefix = b" "

    def __init__(self, *pieces: str) -> None:
        self._pieces = [piece.encode() for piece in pieces] + [b""]
        self.eos_id = len(pieces)

    def id_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def feed(tokenizer, tokens, stop=()):
    completion = Completion(tokenizer, stop)
    return completion, [completion.push(token) for token in tokens]


def test_characters_are_handed_out_whole():
    completion, parts = feed(TOKENIZER, "é東".encode())
    assert parts == ["", "é", "", "", "東"]
    assert (completion.text, completion.finish_reason) == ("é東", "")


def test_the_end_token_ends_and_is_no_text():
    completion, parts = feed(TOKENIZER, [*b"ab", TOKENIZER.eos_id, *b"cd"])
    assert parts == ["a", "b", "", "", ""]
    assert (completion.text, completion.finish_reason, completion.num_tokens) == ("ab", "end", 3)
    assert completion.finish() == ""
    assert completion.finish_reason == "end"


@pytest.mark.parametrize(("at_start", "text"), [(True, " a b"), (False, "  a b")])
def test_what_the_tokenizer_puts_before_every_text_is_not_part_of_it(at_start, text):
    completion = Completion(Pieces(" ", " a", "", " b"), at_start=at_start)
    assert "".join(completion.push(token) for token in (2, 0, 1, 3)) == completion.text == text


def test_a_stop_string_across_tokens_is_cut_off_and_never_handed_out():
    completion, parts = feed(TOKENIZER, b"one STOP two", ["STOP"])
    assert "".join(parts) == completion.text == "one "
    assert (completion.finish_reason, completion.num_tokens) == ("stop", len("one STOP"))


def test_a_stop_string_inside_one_token():
    tokenizer = Pieces("Hello, world", "x")
    completion, parts = feed(tokenizer, [1, 0, 1], [", "])
    assert parts == ["x", "Hello", ""]
    assert completion.finish_reason == "stop"


def test_what_only_began_a_stop_string_is_handed_out_late():
    completion, parts = feed(TOKENIZER, b"a\n\nb", ["\n\n\n"])
    assert parts == ["a", "", "", "\n\nb"]
    # A failed beginning can hold another: "aab" appears in "aaab".
    completion, parts = feed(TOKENIZER, b"aaab", ["aab"])
    assert parts == ["", "", "a", ""]
    assert (completion.text, completion.finish_reason) == ("a", "stop")


def test_the_earliest_of_several_stop_strings_wins():
    completion, _ = feed(Pieces("one two three"), [0], ["three", "two"])
    assert completion.text == "one "


def test_a_stop_string_that_is_part_of_a_longer_one():
    completion, _ = feed(TOKENIZER, b"xENDING", ["ENDING", "END"])
    assert (completion.text, completion.num_tokens) == ("x", 4)


def test_length_hands_out_what_was_held():
    completion, parts = feed(TOKENIZER, b"aST" + "é".encode()[:1], ["STOP", "é"])
    assert parts == ["a", "", "", "ST"]
    assert completion.finish() == "\N{REPLACEMENT CHARACTER}"
    assert (completion.text, completion.finish_reason) == ("aST\N{REPLACEMENT CHARACTER}", "length")


def test_a_stop_string_in_multi_byte_characters():
    completion, _ = feed(TOKENIZER, "東京都".encode(), ["京"])
    assert (completion.text, completion.finish_reason) == ("東", "stop")


def test_an_empty_stop_string_is_a_user_error():
    with pytest.raises(UserError, match="stop string is empty"):
        Completion(TOKENIZER, ["x", ""])
