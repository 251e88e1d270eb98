"""The replay finds every token that differs from the reference, and nothing else (tiny model, float32)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bf16_identity import Reference, Replay, reference_of
from specdecode.lm.runner import PagedLM
from target_service.engine import Engine
from tests.lm.tiny import VOCAB_SIZE, paged_model

MAX_TOKENS = 30
PROMPTS = {0: (1, 2, 3), 1: tuple(range(20, 60)), 2: (7,) * 17}


@pytest.fixture
def engine() -> Engine:
    """An engine on a tiny model, in float32."""
    return Engine(PagedLM(paged_model("llama"), num_blocks=64))


@pytest.fixture
def references(engine: Engine) -> dict[int, Reference]:
    """Of three prompts of different lengths."""
    return {n: reference_of(engine, prompt, MAX_TOKENS, (), b"") for n, prompt in PROMPTS.items()}


def test_a_reference_holds_a_margin_for_each_token(references: dict[int, Reference]) -> None:
    for reference in references.values():
        assert len(reference.token_ids) == len(reference.margins) == MAX_TOKENS
        assert min(reference.margins) > 0


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_in_float32_nothing_flips(
    engine: Engine, references: dict[int, Reference], num_draft_tokens: int
) -> None:
    assert Replay(engine, references, num_draft_tokens, "replay").run() == []


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("position", [0, 7, MAX_TOKENS - 1])
def test_a_reference_that_differs_in_one_token_is_found_there(
    engine: Engine, references: dict[int, Reference], num_draft_tokens: int, position: int
) -> None:
    changed = list(references[1].token_ids)
    changed[position] = (changed[position] + 1) % VOCAB_SIZE
    # After the changed token the model goes on otherwise: only what is up to it can be compared.
    wrong = replace(references[1], token_ids=tuple(changed[: position + 1]))
    flips = Replay(engine, {**references, 1: wrong}, num_draft_tokens, "replay").run()
    assert [(flip.prompt, flip.position, flip.reference) for flip in flips] == [
        (1, position, changed[position])
    ]
    assert flips[0].token == references[1].token_ids[position]
    assert flips[0].margin == references[1].margins[position]


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_after_a_flip_the_run_goes_on_from_the_references_token(
    engine: Engine, references: dict[int, Reference], num_draft_tokens: int
) -> None:
    prompt, text = references[0].prompt, references[0].token_ids
    other = (text[4] + 1) % VOCAB_SIZE
    # What the model says after another token at position 4.
    rest = reference_of(engine, prompt + text[:4] + (other,), MAX_TOKENS - 5, (), b"")
    wrong = Reference(
        prompt, (*text[:4], other, *rest.token_ids), (*references[0].margins[:5], *rest.margins)
    )
    flips = Replay(engine, {0: wrong}, num_draft_tokens, "replay").run()
    assert [(flip.position, flip.token) for flip in flips] == [(4, text[4])]
