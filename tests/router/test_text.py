from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.text import TextStream, Tokenizer
from specdecode.errors import InvalidArgumentError
from specdecode.requests import ChatMessage, ChatPrompt
from specdecode.tokenizer import fingerprint, load_tokenizer
from tests.router import tiny

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EMOJI = "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd e\u0301"
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text(st.sampled_from(EMOJI + "abc \u4f60\u597d"), max_size=40),
)


def rounds_of(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def stream_pieces(stream: TextStream, rounds: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    """Pieces taken after each round, and at the end."""
    pieces = []
    for ids in rounds:
        stopped = any(stream.push(token_id) for token_id in ids)
        pieces.append(stream.take())
        if stopped:
            return pieces
    stream.finish()
    return [*pieces, stream.take()]


@pytest.fixture(params=["byte_level", "byte_fallback", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@relaxed
@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=6))
async def test_pieces_add_up_to_the_decoded_text_however_rounds_split_it(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode_text(text)
    pieces = stream_pieces(TextStream(tokenizer.detokenizer()), rounds_of(ids, cuts))
    assert "".join(piece for piece, _ in pieces) == tokenizer.decode(ids)
    assert sum(count for _, count in pieces) == len(ids)


@relaxed
@given(
    text=texts.map(lambda text: text.replace("\ufffd", "")), cuts=st.lists(st.integers(0, 200), max_size=6)
)
async def test_a_character_split_over_rounds_is_never_shown_as_replacement(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode_text(text)
    if "\ufffd" in tokenizer.decode(ids):
        return  # a character that the vocabulary cannot say
    for piece, _ in stream_pieces(TextStream(tokenizer.detokenizer()), rounds_of(ids, cuts)):
        assert "\ufffd" not in piece


@relaxed
@given(data=st.data())
def test_any_ids_of_a_byte_level_vocabulary_add_up_to_their_decoded_text(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=30))
    pieces = stream_pieces(TextStream(byte_level.detokenizer()), [[i] for i in ids])
    assert "".join(piece for piece, _ in pieces) == byte_level.decode(ids)


@relaxed
@given(data=st.data())
def test_any_ids_of_smollm2_add_up_to_their_decoded_text(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=30))
    pieces = stream_pieces(TextStream(smollm2.detokenizer()), [[i] for i in ids])
    assert "".join(piece for piece, _ in pieces) == smollm2.decode(ids)


async def test_a_character_comes_with_its_last_byte_and_its_ids_with_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_text("a\U0001f469")
    assert len(ids) == 5, "the emoji must be four tokens here"
    pieces = stream_pieces(TextStream(byte_level.detokenizer()), [[i] for i in ids])
    assert pieces == [("a", 1), ("", 0), ("", 0), ("", 0), ("\U0001f469", 4), ("", 0)]


def test_bytes_that_never_became_a_character_come_out_at_the_end(byte_level: Tokenizer) -> None:
    (lead, *_rest) = byte_level._backend.encode("\U0001f469").ids
    pieces = stream_pieces(TextStream(byte_level.detokenizer()), [[lead], [lead]])
    assert pieces == [("", 0), ("", 0), ("\ufffd\ufffd", 2)]


def cut_at_stops(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the stop string that ends first wins, the longest of several that end there."""
    ends = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not ends:
        return text, None
    _, start, stop = min(ends)
    return text[:start], stop


@relaxed
@given(
    text=st.text("abc ", max_size=30),
    stops=st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
async def test_stop_strings_cut_by_definition_over_all_token_and_round_boundaries(
    byte_level: Tokenizer, text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = byte_level.encode_text(text)
    stream = TextStream(byte_level.detokenizer(), stops)
    pieces = stream_pieces(stream, rounds_of(ids, cuts))
    assert ("".join(piece for piece, _ in pieces), stream.stop) == cut_at_stops(byte_level.decode(ids), stops)
    kept = sum(count for _, count in pieces)
    if stream.stop is None:
        assert kept == len(ids)
    else:
        assert cut_at_stops(byte_level.decode(ids[:kept]), stops)[1] == stream.stop
        assert cut_at_stops(byte_level.decode(ids[: kept - 1]), stops)[1] is None


@pytest.mark.parametrize("split", range(1, 12))
async def test_a_stop_string_is_found_at_every_split_point(byte_level: Tokenizer, split: int) -> None:
    text = "fox <|stop|> dog"
    start = text.index("<|stop|>")
    head, tail = text[: start + split], text[start + split :]
    ids = [*byte_level.encode_text(head), *byte_level.encode_text(tail)]
    stream = TextStream(byte_level.detokenizer(), ["<|stop|>"])
    pieces = stream_pieces(stream, [[i] for i in ids])
    assert "".join(piece for piece, _ in pieces) == "fox "
    assert stream.stop == "<|stop|>"


async def test_no_piece_holds_the_beginning_of_a_stop_string_that_later_completes(
    byte_level: Tokenizer,
) -> None:
    ids = [token for char in "ab##c##STOP" for token in byte_level.encode_text(char)]
    stream = TextStream(byte_level.detokenizer(), ["##STOP"])
    said = [piece for piece, _ in stream_pieces(stream, [[i] for i in ids])]
    assert said == ["a", "b", "", "", "##c", "", "", "", "", "", ""]


async def test_the_text_of_each_piece_is_the_text_of_its_ids(byte_level: Tokenizer) -> None:
    ids = list(byte_level.encode_text("the stop st\U0001f469ring sto"))
    stream = TextStream(byte_level.detokenizer(), ["stops"])
    taken = 0
    for piece, count in stream_pieces(stream, [[i] for i in ids]):
        assert piece == byte_level.decode(ids[taken : taken + count])
        taken += count
    assert taken == len(ids)


async def test_stop_strings_wait_for_min_tokens(byte_level: Tokenizer) -> None:
    ids = [token for char in "a.b.c" for token in byte_level.encode_text(char)]
    stream = TextStream(byte_level.detokenizer(), ["."], min_tokens=3)
    assert "".join(piece for piece, _ in stream_pieces(stream, [[i] for i in ids])) == "a.b"


async def test_long_prompts_tokenise_to_the_same_ids_as_short_ones(byte_level: Tokenizer) -> None:
    word = "the quick brown fox "
    long = byte_level.encode_text(word * 1000)
    assert tuple(byte_level._backend.encode(word * 1000).ids) == long


async def test_text_prompts_keep_the_characters_they_came_with(tokenizer: Tokenizer) -> None:
    text = unicodedata.normalize("NFD", "caf\u00e9")
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


async def test_chat_is_rendered_by_the_template(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_chat(ChatPrompt((ChatMessage("user", "the fox"),)))
    assert ids[0] == tiny.BOS
    assert byte_level.decode(ids) == "user\nthe fox\nassistant"


async def test_chat_that_the_template_refuses_names_the_field(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="unknown role") as caught:
        byte_level.encode_chat(ChatPrompt((ChatMessage("robot", "hello"),)))
    assert caught.value.violations[0].field == "chat"


def test_fingerprints_differ_with_the_vocabulary_and_only_then(
    byte_level: Tokenizer, byte_fallback: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("again"))
    smaller = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("smaller"), num_merges=20)
    assert fingerprint(load_tokenizer(again)) == byte_level.fingerprint
    assert fingerprint(load_tokenizer(smaller)) != byte_level.fingerprint
    assert byte_fallback.fingerprint != byte_level.fingerprint
