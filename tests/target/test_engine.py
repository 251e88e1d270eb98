"""Orders in, results out: what each order does, and where each sequence ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdecode.lm.runner import PagedLM
from specdecode.types import FinishReason, Lease, Method, Origin, SparseDistributions, Verify
from target_service.engine import Engine
from tests.lm.tiny import MAX_LENGTH, paged_model, random_prompt
from tests.target.driver import Client, Drafter, make_engine, opening
from tests.target.reference import continuation
from tests.target.texts import GREEDY_TEXT, OTHER_PROMPT, OTHER_TEXT, PROMPT, WRONG


def started(**options: Any) -> Client:
    """A client with sequence 0 open, its prompt computed, waiting for orders."""
    client = Client(make_engine())
    client.send(opening(0, PROMPT, **{"max_tokens": 40, **options}))
    client.settle()
    return client


# Orders


def test_open_alone_emits_nothing_and_computes_all_but_the_last_token() -> None:
    client = started()
    assert client.results == {}
    assert client.state(0).kv.kv_len == len(PROMPT) - 1
    assert not client.engine.has_work


def test_verify_together_with_open_runs_on_the_prompts_last_token() -> None:
    client = Client(make_engine())
    opened = opening(0, PROMPT, max_tokens=40)
    client.send(opened, Verify(0, len(PROMPT), (GREEDY_TEXT[0], GREEDY_TEXT[1], WRONG, WRONG)))
    result = client.step()[0]
    assert result.token_ids == tuple(GREEDY_TEXT[:3])
    assert result.origins == (Origin.ACCEPTED, Origin.ACCEPTED, Origin.RECOVERED)
    assert (result.num_drafted, result.num_accepted, result.lease_left) == (4, 2, 0)
    assert (result.tested, result.passed) == ((1, 1, 1, 0), (1, 1, 0, 0))
    assert result.committed_length == len(PROMPT) + 3


def test_all_drafts_accepted_end_in_a_bonus_and_no_drafts_in_a_plain_token() -> None:
    client = started()
    client.send(client.verify(0, *GREEDY_TEXT[:2]))
    assert client.step()[0].origins == (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)
    client.send(client.verify(0))
    assert client.step()[0].origins == (Origin.PLAIN,)
    assert client.tokens(0) == GREEDY_TEXT[:4]


def test_a_rejected_single_draft_is_replaced_and_leaves_no_trace() -> None:
    client = started()
    for expected in GREEDY_TEXT[:20]:
        client.send(client.verify(0, WRONG))
        result = client.step()[0]
        assert (result.token_ids, result.origins) == ((expected,), (Origin.RECOVERED,))
        assert (result.num_drafted, result.num_accepted) == (1, 0)


@pytest.mark.parametrize("off_by", [-1, 1, 5])
def test_a_verify_for_another_length_is_dropped(off_by: int) -> None:
    client = started()
    client.send(client.verify(0))
    client.step()
    client.send(Verify(0, client.length(0) + off_by, (WRONG,)))
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT[:1]
    client.send(client.verify(0, GREEDY_TEXT[1]))
    assert client.step()[0].token_ids == tuple(GREEDY_TEXT[1:3])


def test_a_newer_verify_replaces_one_that_has_not_run() -> None:
    client = started()
    client.send(client.verify(0, WRONG))
    client.send(client.verify(0, *GREEDY_TEXT[:3]))
    assert client.step()[0].token_ids == tuple(GREEDY_TEXT[:4])
    assert not client.engine.has_work


def test_a_lease_emits_one_token_a_step_until_it_is_used_up() -> None:
    client = started()
    client.send(client.lease(0, 3))
    client.settle()
    assert [result.lease_left for result in client.results[0]] == [2, 1, 0]
    assert [result.origins for result in client.results[0]] == [(Origin.PLAIN,)] * 3
    assert client.tokens(0) == GREEDY_TEXT[:3]


def test_a_lease_replaces_the_limit_and_is_absolute() -> None:
    client = started()
    start = len(PROMPT)
    client.send(Lease(0, start, 10))
    client.step()
    assert client.step()[0].lease_left == 8
    client.send(Lease(0, start + 1, 3))
    assert client.step()[0].lease_left == 1
    client.send(Lease(0, start, 6))
    assert client.step()[0].lease_left == 2
    client.send(Lease(0, start + 1, 2))
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT[:4]


def test_a_verify_takes_over_from_a_lease() -> None:
    client = started()
    client.send(client.lease(0, 10))
    client.step()
    client.send(client.verify(0, *GREEDY_TEXT[1:4]))
    assert client.step()[0].token_ids == tuple(GREEDY_TEXT[1:5])
    assert client.last(0).lease_left == 0
    assert not client.engine.has_work


def test_a_sequence_resumed_with_output_counts_it() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, GREEDY_TEXT[:12], max_tokens=20))
    client.run(lambda sequence: client.verify(sequence, WRONG))
    assert client.tokens(0) == GREEDY_TEXT[12:20]
    assert client.last(0).finish_reason is FinishReason.LENGTH


def test_cached_tokens_are_told_with_the_first_result_only() -> None:
    client = started(max_tokens=4)
    client.run(lambda sequence: client.lease(sequence, 1))
    client.send(opening(1, PROMPT, max_tokens=4))
    client.run(lambda sequence: client.lease(sequence, 1))
    assert [result.num_cached_tokens for result in client.results[0]] == [0, 0, 0, 0]
    assert [result.num_cached_tokens for result in client.results[1]] == [16, 0, 0, 0]


def test_the_prompt_of_a_request_that_ends_in_its_first_step_is_cached() -> None:
    client = Client(make_engine())
    for sequence in (0, 1):
        client.send(opening(sequence, PROMPT, max_tokens=1), Lease(sequence, len(PROMPT), 1))
        assert client.step()[sequence].finish_reason is FinishReason.LENGTH
    assert client.last(1).num_cached_tokens == 16


def test_streams_do_not_see_each_others_sequences() -> None:
    engine = make_engine()
    mine, other = Client(engine, stream=1), Client(engine, stream=2)
    mine.send(opening(0, PROMPT, max_tokens=8))
    other.send(opening(0, PROMPT[:5], max_tokens=8))
    other.send(0)
    mine.run(lambda sequence: mine.lease(sequence, 8))
    assert mine.tokens(0) == GREEDY_TEXT[:8]
    assert not engine.sequences


# Ends


def first_occurrences(tokens: list[int]) -> list[int]:
    """Indices at which a token occurs for the first time."""
    return [index for index, token in enumerate(tokens) if token not in tokens[:index]]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("kind", ["right", "half right", "wrong"])
def test_a_stop_id_cuts_ids_origins_and_logprobs_wherever_it_falls(kind: str, num_draft_tokens: int) -> None:
    for end in first_occurrences(GREEDY_TEXT[:12]):
        stop = (GREEDY_TEXT[end],)
        client = started(stop_token_ids=stop, logprobs=0)
        drafter = Drafter(client, {0: GREEDY_TEXT}, kind)
        client.run(lambda sequence, drafter=drafter: drafter.verify(sequence, num_draft_tokens))
        assert client.tokens(0) == GREEDY_TEXT[: end + 1]
        assert client.last(0).finish_reason is FinishReason.STOP


def test_a_stop_id_inside_an_accepted_run_drops_what_was_accepted_after_it() -> None:
    end = next(index for index in first_occurrences(GREEDY_TEXT) if index >= 2)
    client = started(stop_token_ids=(GREEDY_TEXT[end],), logprobs=1)
    client.send(client.verify(0, *GREEDY_TEXT[: end + 4]))
    result = client.step()[0]
    assert result.token_ids == tuple(GREEDY_TEXT[: end + 1])
    assert result.origins == (Origin.ACCEPTED,) * (end + 1)
    assert (result.num_drafted, result.num_accepted) == (end + 4, end + 1)
    assert len(result.logprobs) == end + 1
    assert client.engine.lm.pool.num_free == 64


def test_the_earliest_boundary_wins() -> None:
    ends = first_occurrences(GREEDY_TEXT)[2:5]
    stops = tuple(GREEDY_TEXT[end] for end in reversed(ends))
    for max_tokens, length, reason in (
        (ends[0], ends[0], FinishReason.LENGTH),
        (ends[0] + 1, ends[0] + 1, FinishReason.STOP),
        (ends[0] + 2, ends[0] + 1, FinishReason.STOP),
    ):
        client = started(stop_token_ids=stops, max_tokens=max_tokens)
        client.send(client.verify(0, *GREEDY_TEXT[:16]))
        assert client.step()[0].token_ids == tuple(GREEDY_TEXT[:length])
        assert client.last(0).finish_reason is reason


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_never_one_token_past_max_tokens(max_tokens: int, method: Method) -> None:
    client = started(max_tokens=max_tokens, method=method, temperature=0.0)
    client.send(client.verify(0, *GREEDY_TEXT[:8]))
    result = client.step()[0]
    assert result.token_ids == tuple(GREEDY_TEXT[:max_tokens])
    assert result.num_drafted == min(8, max_tokens - 1)
    assert result.finish_reason is FinishReason.LENGTH
    assert client.engine.lm.pool.num_free == 64


def test_a_lease_past_max_tokens_ends_there() -> None:
    client = started(max_tokens=5)
    client.send(client.lease(0, 100))
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT[:5]
    assert client.last(0).finish_reason is FinishReason.LENGTH


def test_a_sequence_may_fill_the_context_and_not_one_token_more() -> None:
    prompt = random_prompt(MAX_LENGTH - 4, seed=8)
    client = Client(make_engine())
    client.send(opening(0, prompt, max_tokens=4), opening(1, prompt, max_tokens=5))
    client.step()
    assert client.last(1).error is not None
    client.settle()
    client.send(client.verify(0, *[WRONG] * 32))
    client.run(lambda sequence: client.verify(sequence, *[WRONG] * 32))
    assert client.tokens(0) == continuation("llama", opening(0, prompt, max_tokens=4))


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_a_seed_of_the_engine_reproduces_its_noise(method: Method) -> None:
    def text(seed: int) -> list[int]:
        client = Client(make_engine(generator=torch.Generator().manual_seed(seed)))
        client.send(opening(0, PROMPT, max_tokens=30, method=method, temperature=1.5))
        client.run(Drafter(client, {0: GREEDY_TEXT}, "random").any_order)
        return client.tokens(0)

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize("trusting", ["all", "not this engine", "not this request"])
def test_q_counts_only_where_the_draft_is_trusted(trusting: str) -> None:
    """A q that understates its draft makes it pass nearly always: q · u < p."""
    engine = make_engine(trust_draft=trusting != "not this engine")
    client = Client(engine)
    client.send(
        opening(
            0,
            PROMPT,
            max_tokens=30,
            method=Method.REJECTION,
            temperature=1.0,
            trust_draft=trusting != "not this request",
            allowed_token_ids=(3, WRONG),
            logit_bias=((3, 100.0), (WRONG, 70.0)),
        )
    )
    unlikely = SparseDistributions(
        np.array([2], np.int32), np.array([3, WRONG], np.int32), np.array([1.0, 1e-30], np.float32)
    )
    client.run(lambda sequence: client.verify(sequence, WRONG, q=unlikely))
    accepted = sum(result.num_accepted for result in client.results[0])
    assert accepted == (15 if trusting == "all" else 0)


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_any_block_size_gives_the_same_text(block_size: int) -> None:
    engine = Engine(PagedLM(paged_model("llama"), num_blocks=-(-400 // block_size), block_size=block_size))
    client = Client(engine)
    client.send(opening(0, PROMPT, max_tokens=40), opening(1, OTHER_PROMPT, max_tokens=40))
    drafter = Drafter(client, {0: GREEDY_TEXT, 1: OTHER_TEXT})
    client.run(drafter.any_order)
    assert (client.tokens(0), client.tokens(1)) == (GREEDY_TEXT, OTHER_TEXT)


def test_times_and_load_tell_what_a_step_did() -> None:
    now = [10.0]
    client = Client(make_engine(clock=lambda: now[0]))
    client.send(opening(0, PROMPT, max_tokens=40), opening(1, OTHER_PROMPT, max_tokens=40))
    client.settle()
    client.send(client.verify(0, WRONG, WRONG), client.lease(1, 2))
    now[0] = 13.0
    results = client.step()
    assert [results[n].times.queue for n in (0, 1)] == [3.0, 3.0]
    load = client.engine.load
    assert (load.num_running, load.num_waiting, load.tokens_in_flight, load.num_rows) == (2, 0, 4, 4)
    assert load.num_cached_tokens == len(PROMPT) + len(OTHER_PROMPT)
    assert (load.num_blocks, load.num_free_blocks) == (64, 64 - 2 - 1)
    now[0] = 14.0
    assert client.step()[1].times.queue == 1.0
