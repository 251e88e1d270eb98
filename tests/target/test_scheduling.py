"""Blocks and turns: who waits, who gives way, what is shared, and that everything comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdecode.errors import Reason
from specdecode.types import FinishReason, Verify
from target_service.scheduler import SchedulerLimits
from tests.lm.tiny import random_prompt
from tests.target.driver import Client, Drafter, make_engine, opening
from tests.target.reference import continuation
from tests.target.texts import GREEDY_TEXT, OTHER_PROMPT, OTHER_TEXT, PROMPT, WRONG, prompt_lease

LONG_PROMPT = random_prompt(100, seed=6)


def blocks_used(client: Client) -> int:
    pool = client.engine.lm.pool
    return pool.num_blocks - pool.num_free


def waiting(client: Client) -> list[int]:
    return [sequence.key.sequence for sequence in client.engine.scheduler.waiting]


# Everything comes back


def while_waiting(client: Client) -> None:
    client.send(opening(9, [1, 2], max_tokens=4, deadline=1.0))
    client.step()
    client.send(opening(0, PROMPT, max_tokens=40, deadline=1.0))
    client.step()
    assert waiting(client) == [0]


def in_prefill(client: Client) -> None:
    client.send(opening(0, LONG_PROMPT, max_tokens=40, deadline=1.0))
    client.step()
    client.step()
    assert client.state(0).kv.kv_len == 14


def between_rounds(client: Client) -> None:
    client.send(opening(0, PROMPT, max_tokens=40, deadline=1.0))
    client.settle()
    client.send(client.verify(0, *GREEDY_TEXT[:3], WRONG))
    client.step()
    assert not client.state(0).ready


def ordered(client: Client) -> None:
    between_rounds(client)
    client.send(client.verify(0, WRONG, WRONG))


def leased(client: Client) -> None:
    client.send(opening(0, PROMPT, max_tokens=40, deadline=1.0), prompt_lease(30))
    for _ in range(7):
        client.step()
    assert client.last(0).lease_left > 0


def preempted(client: Client) -> None:
    leased(client)
    client.engine.scheduler._preempt(client.state(0))


PHASES = [while_waiting, in_prefill, between_rounds, ordered, leased, preempted]


@pytest.mark.parametrize("lost", ["closed", "stream lost", "deadline passed"])
@pytest.mark.parametrize("phase", PHASES)
def test_blocks_come_back_within_a_step(phase: Callable[[Client], None], lost: str) -> None:
    now = [0.0]
    limits = SchedulerLimits(max_running=1, prefill_chunk=7)
    client = Client(make_engine(limits=limits, clock=lambda: now[0]))
    phase(client)
    match lost:
        case "closed":
            client.send(*client.open)
        case "stream lost":
            client.engine.close_stream(client.stream)
        case _:
            now[0] = 2.0
    client.step()
    assert not client.engine.sequences
    assert client.engine.lm.pool.num_free == 64
    assert not client.engine.has_work
    client.send(opening(1, PROMPT, max_tokens=40))
    client.run(lambda sequence: client.lease(sequence, 40))
    assert client.tokens(1) == GREEDY_TEXT


def test_a_deadline_ends_the_sequence_and_no_other() -> None:
    now = [100.0]
    client = Client(make_engine(clock=lambda: now[0]))
    client.send(opening(0, PROMPT, max_tokens=40, deadline=101.0), opening(1, PROMPT, max_tokens=40))
    client.send(prompt_lease(40, 0), prompt_lease(40, 1))
    client.step()
    assert client.engine.next_deadline() == 101.0
    now[0] = 101.0
    error = client.step()[0].error
    assert error is not None
    assert error.reason is Reason.DEADLINE
    client.settle()
    assert client.tokens(1) == GREEDY_TEXT
    assert client.tokens(0) == GREEDY_TEXT[: len(client.tokens(0))]
    assert client.engine.next_deadline() is None


def test_a_deadline_is_work_even_when_nobody_has_orders() -> None:
    now = [100.0]
    client = Client(make_engine(clock=lambda: now[0]))
    client.send(opening(0, PROMPT, max_tokens=40, deadline=101.0))
    client.settle()
    now[0] = 101.5
    assert client.engine.has_work
    client.step()
    assert not client.engine.has_work


# Sharing


def test_identical_prompts_opened_at_once_share_their_full_blocks() -> None:
    client = Client(make_engine())
    client.send(*(opening(n, LONG_PROMPT, max_tokens=8, temperature=1.0, choice_index=n) for n in range(4)))
    client.settle()
    assert blocks_used(client) == 6 + 4
    client.run(lambda sequence: client.lease(sequence, 8))
    for n in range(4):
        opened = opening(n, LONG_PROMPT, max_tokens=8, temperature=1.0, choice_index=n)
        assert client.tokens(n) == continuation("llama", opened)
        assert client.results[n][0].num_cached_tokens == (96 if n else 0)


def test_who_waits_for_a_prefix_goes_on_when_its_owner_is_closed() -> None:
    client = Client(make_engine(limits=SchedulerLimits(prefill_chunk=20)))
    client.send(opening(0, LONG_PROMPT, max_tokens=4), opening(1, LONG_PROMPT, max_tokens=4))
    client.step()
    assert client.state(1).kv.kv_len == 0
    client.send(0)
    client.settle()
    client.send(client.lease(1, 4))
    client.settle()
    assert client.tokens(1) == continuation("llama", opening(1, LONG_PROMPT, max_tokens=4))


def test_who_needs_only_part_of_a_prefix_does_not_wait_for_the_rest() -> None:
    client = Client(make_engine(limits=SchedulerLimits(prefill_chunk=16)))
    client.send(opening(0, LONG_PROMPT, max_tokens=4), opening(1, LONG_PROMPT[:20], max_tokens=4))
    client.step()
    client.step()
    assert client.state(1).kv.kv_len == 19
    assert client.state(0).kv.kv_len == 32


def test_salted_prompts_share_nothing() -> None:
    client = Client(make_engine())
    client.send(*(opening(n, LONG_PROMPT, max_tokens=8, cache_salt=bytes([n // 2])) for n in range(4)))
    client.settle()
    assert blocks_used(client) == 2 * 6 + 4


def test_rolling_back_one_of_two_that_share_a_prefix_leaves_the_other_alone() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    client.send(opening(1, PROMPT, max_tokens=40))
    client.settle()
    assert client.state(0).kv.block_table[0] == client.state(1).kv.block_table[0]
    drafter = Drafter(client, {0: GREEDY_TEXT}, "wrong")
    client.run(lambda n: drafter.verify(0, 8) if n == 0 else client.lease(1, 3))
    assert client.tokens(0) == client.tokens(1) == GREEDY_TEXT


# Giving way


def test_drafts_take_only_what_everybodys_own_tokens_leave() -> None:
    client = Client(make_engine(num_blocks=5))
    client.send(opening(0, LONG_PROMPT[:30], max_tokens=40), opening(1, LONG_PROMPT[50:67], max_tokens=8))
    client.settle()
    assert blocks_used(client) == 3
    client.send(client.verify(0, *[WRONG] * 32), client.verify(1))
    results = client.step()
    assert (results[0].num_drafted, results[1].num_drafted) == (18, 0)
    assert len(results[0].token_ids) == len(results[1].token_ids) == 1
    assert [client.state(n).num_preemptions for n in (0, 1)] == [0, 0]


def test_speculation_never_preempts() -> None:
    """Deep drafts in a pool that the sequences' own tokens just fit into."""
    client = Client(make_engine(num_blocks=9))
    texts = {}
    for n in range(3):
        opened = opening(n, random_prompt(14, seed=n), max_tokens=33)
        texts[n] = continuation("llama", opened)
        client.send(opened)
    drafter = Drafter(client, texts)
    client.run(lambda n: drafter.verify(n, 32))
    assert [client.tokens(n) for n in range(3)] == [texts[n] for n in range(3)]
    assert [client.last(n).num_preemptions for n in range(3)] == [0, 0, 0]


def test_who_is_admitted_together_is_not_preempted_in_prefill() -> None:
    client = Client(make_engine(num_blocks=16, limits=SchedulerLimits(prefill_chunk=8)))
    prompts = [random_prompt(100, seed=n) for n in range(4)]
    client.send(*(opening(n, prompt, max_tokens=2) for n, prompt in enumerate(prompts)))
    client.run(lambda n: client.lease(n, 2))
    assert [client.last(n).num_preemptions for n in range(4)] == [0, 0, 0, 0]
    for n, prompt in enumerate(prompts):
        assert client.tokens(n) == continuation("llama", opening(n, prompt, max_tokens=2))


def test_the_youngest_gives_way_and_resumes_where_it_was() -> None:
    client = Client(make_engine(num_blocks=5))
    client.send(opening(0, PROMPT, max_tokens=40), opening(1, OTHER_PROMPT, max_tokens=40))
    client.run(lambda n: client.lease(n, 2))
    assert (client.tokens(0), client.tokens(1)) == (GREEDY_TEXT, OTHER_TEXT)
    assert client.last(0).num_preemptions == 0
    assert client.last(1).num_preemptions > 0


def test_the_youngest_gives_way_even_if_others_are_idle_too() -> None:
    client = Client(make_engine(num_blocks=5))
    for n in range(3):
        client.send(opening(n, random_prompt(12, seed=n), max_tokens=40))
        client.settle()
    client.send(client.lease(0, 40))
    client.settle()
    assert client.tokens(0) == continuation("llama", opening(0, random_prompt(12, seed=0), max_tokens=40))
    assert [client.state(n).num_preemptions for n in (1, 2)] == [0, 1]


def test_who_was_preempted_comes_back_before_who_has_not_run_yet() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_running=2)))
    client.send(*(opening(n, random_prompt(12, seed=n), max_tokens=4) for n in range(3)))
    client.settle()
    client.engine.scheduler._preempt(client.state(0))
    client.settle()
    assert waiting(client) == [2]


def test_who_waits_for_a_prefix_keeps_its_place() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_running=2, prefill_chunk=50)))
    client.send(*(opening(n, LONG_PROMPT, max_tokens=4) for n in range(4)))
    client.step()
    assert waiting(client) == [1, 2, 3]
    client.settle()
    assert waiting(client) == [2, 3]


def test_a_preempted_sequence_keeps_its_order() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    client.send(client.verify(0, *GREEDY_TEXT[:5], WRONG))
    client.engine.scheduler._preempt(client.state(0))
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT[:6]
    assert client.last(0).num_preemptions == 1
    assert client.last(0).num_cached_tokens == 0


def test_what_waits_is_admitted_when_idle_sequences_end() -> None:
    client = Client(make_engine(num_blocks=4))
    client.send(opening(0, PROMPT, max_tokens=20), opening(1, PROMPT[::-1], max_tokens=20))
    client.settle()
    assert waiting(client) == [1]
    client.send(0)
    assert client.engine.has_work
    client.settle()
    assert client.state(1).kv.kv_len == len(PROMPT) - 1


def test_admission_keeps_its_order() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_running=1)))
    prompts = [random_prompt(5, seed=n) for n in range(4)]
    for n, prompt in enumerate(prompts):
        client.send(opening(n, prompt, max_tokens=2), Verify(n, 5, (WRONG,)))
    ended = []
    while client.engine.sequences:
        client.send(*(client.verify(n) for n in client.results if not client.ended(n)))
        ended += [n for n, result in client.step().items() if result.finish_reason is FinishReason.LENGTH]
    assert ended == [0, 1, 2, 3]


# Turns


def test_a_long_prompt_delays_nobodys_round() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_tokens_in_flight=33, prefill_chunk=30)))
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    client.send(opening(1, LONG_PROMPT, max_tokens=4), prompt_lease(40))
    lengths = []
    for _ in range(4):
        assert client.step()[0].origins
        lengths.append(client.state(1).kv.kv_len)
    assert lengths == [30, 60, 90, 99]


def test_windows_that_exceed_the_budget_take_turns() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_tokens_in_flight=33)))
    prompts = [random_prompt(5, seed=n) for n in range(4)]
    client.send(*(opening(n, prompt, max_tokens=40) for n, prompt in enumerate(prompts)))
    client.settle()
    served: list[set[int]] = []
    for _ in range(8):
        client.send(*(client.verify(n, *[WRONG] * 15) for n in range(4) if not client.state(n).ready))
        served.append(set(client.step()))
    assert served == [{0, 1}, {2, 3}] * 4
    assert client.engine.load.tokens_in_flight == 32


@pytest.mark.parametrize("num_draft_tokens", [0, 5, 32])
def test_a_step_never_runs_more_tokens_than_its_budget(num_draft_tokens: int) -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_tokens_in_flight=40, prefill_chunk=39)))
    for n in range(6):
        client.send(opening(n, random_prompt(30 + n, seed=n), max_tokens=6))
    loads = []

    def order(sequence: int) -> Verify:
        loads.append(client.engine.load.tokens_in_flight)
        return client.verify(sequence, *[WRONG] * num_draft_tokens)

    client.run(order)
    assert 0 < max(loads) <= 40


def test_a_prompt_is_taken_in_while_windows_fill_every_step() -> None:
    limits = SchedulerLimits(max_tokens_in_flight=40, prefill_chunk=16)
    client = Client(make_engine(num_blocks=256, limits=limits))
    for number in range(12):
        client.send(opening(number, PROMPT, max_tokens=200))
    client.settle()
    wrong = [WRONG] * 4
    for number in range(12):
        client.send(client.verify(number, *wrong))
    client.send(opening(99, LONG_PROMPT, max_tokens=4))
    for _ in range(20):
        for number in range(12):
            if not client.state(number).ready:
                client.send(client.verify(number, *wrong))
        client.step()
    assert client.state(99).kv.kv_len == len(LONG_PROMPT) - 1
