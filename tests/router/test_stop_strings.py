"""Which of several stop strings ends a text, where tokens are longer than a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.text import TextStream


class Spelled:
    """A detokenizer of tokens that stand for these words."""

    incomplete = False

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def push(self, token_id: int) -> str:
        return self._words[token_id]

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("words", "stops", "text", "stop", "num_tokens"),
    [
        pytest.param(["say", " one two", "!"], ["two", "one"], "say ", "one", 2, id="both in one token"),
        pytest.param(["x", "abcd", "y"], ["abcd", "bc"], "xa", "bc", 2, id="the one that ends first"),
        pytest.param(["x", "abc", "y"], ["bc", "abc", "c"], "x", "abc", 2, id="the longest that ends there"),
        pytest.param(["xa", "bc", "y"], ["c", "abc"], "x", "abc", 2, id="the longest, over two tokens"),
        pytest.param(["a", "ab", "c"], ["abc", "b"], "aa", "b", 2, id="a shorter one inside a longer one"),
        pytest.param(["ab", "ab", "x"], ["bb", "aba"], "", "aba", 2, id="begins in what was held"),
        pytest.param(["ab", "a", "cab"], ["abc"], "abacab", None, 3, id="only its beginning"),
    ],
)
def test_the_stop_string_that_ends_first_wins(
    words: list[str], stops: list[str], text: str, stop: str | None, num_tokens: int
) -> None:
    stream = TextStream(Spelled(words), stops)
    said, released = "", 0
    for token_id in range(len(words)):
        ended = stream.push(token_id)
        piece, count = stream.take()
        said, released = said + piece, released + count
        if ended:
            break
    else:
        stream.finish()
        piece, count = stream.take()
        said, released = said + piece, released + count
    assert (said, stream.stop, released) == (text, stop, num_tokens)
