"""Whatever is accepted, rejected, closed, resumed or preempted: the KV kept is that of a fresh prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import ClassVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from specdecode.lm.runner import Chunk, PagedLM
from specdecode.lm.sequence import KVSequence
from specdecode.types import OpenSequence
from target_service.scheduler import SchedulerLimits
from tests.lm.tiny import VOCAB_SIZE, paged_model, random_prompt
from tests.target.driver import Client, make_engine, opening
from tests.target.reference import continuation

NUM_BLOCKS = 14
MAX_TOKENS = 28
SHARED = random_prompt(40)
PROMPTS = [SHARED[:1], SHARED[:16], SHARED[:17], SHARED[:33], SHARED, [*SHARED[:20], 1, 2, 3], [7] * 15]


@cache
def text_after(name: str, prompt: tuple[int, ...]) -> list[int]:
    return continuation(name, opening(0, prompt, max_tokens=MAX_TOKENS))


def stored_kv(lm: PagedLM, kv: KVSequence, length: int) -> list[torch.Tensor]:
    """Keys and values of positions 0 … length - 1 in every layer, read through the block table."""
    table = torch.tensor(kv.block_table)
    return [stored[table].flatten(0, 1)[:length] for stored in (*lm.kv.keys, *lm.kv.values)]


def fresh_kv(name: str, token_ids: Sequence[int]) -> list[torch.Tensor]:
    """The same of a prefill in one piece, in a pool of its own."""
    lm = PagedLM(paged_model(name), num_blocks=8)
    sequence = lm.new_sequence(token_ids)
    lm.forward([Chunk(sequence, token_ids, 0)])
    return stored_kv(lm, sequence, len(token_ids))


class EngineMachine(RuleBasedStateMachine):
    """Random orders by any number of sequences that share prefixes, in a pool that is too small."""

    model: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        limits = SchedulerLimits(max_running=5, max_tokens_in_flight=40, prefill_chunk=24)
        self.client = Client(make_engine(self.model, NUM_BLOCKS, limits))
        self.opened: dict[int, OpenSequence] = {}
        self.numbers = count()

    @initialize(prompts=st.lists(st.sampled_from(PROMPTS), min_size=2, max_size=4))
    def open_some(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.open(prompt)

    @rule(prompt=st.sampled_from(PROMPTS))
    def open(self, prompt: list[int], output: Sequence[int] = ()) -> None:
        opened = opening(next(self.numbers), prompt, output, max_tokens=MAX_TOKENS)
        self.opened[opened.sequence] = opened
        self.client.send(opened)

    @precondition(lambda self: self.client.open)
    @rule(data=st.data(), right=st.lists(st.booleans(), max_size=8))
    def verify(self, data: st.DataObject, right: list[bool]) -> None:
        self._order_verify(self._any(data), right)

    @precondition(lambda self: self.client.open)
    @rule(num_right=st.integers(0, 10), num_wrong=st.integers(0, 6))
    def verify_all_due(self, num_right: int, num_wrong: int) -> None:
        for sequence in self.client.open:
            if not self.client.state(sequence).ready:
                self._order_verify(sequence, [True] * num_right + [False] * num_wrong)
        self.step()

    @precondition(lambda self: self.client.open)
    @rule(data=st.data(), num_tokens=st.integers(0, 6))
    def lease(self, data: st.DataObject, num_tokens: int) -> None:
        self.client.send(self.client.lease(self._any(data), num_tokens))

    @rule()
    def step(self) -> None:
        results = self.client.step()
        for sequence in results:
            text = self._text(sequence)
            assert self._emitted(sequence) == text[: len(self._emitted(sequence))]
        for sequence in self.client.open:
            state = self.client.state(sequence)
            if sequence in results:
                assert state.kv.kv_len == state.committed_length - 1
            self._check_kv(state.kv)

    @precondition(lambda self: self.client.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.client.send(self._any(data))

    @precondition(lambda self: self.client.open)
    @rule(data=st.data())
    def reopen_with_output(self, data: st.DataObject) -> None:
        """As a router does whose replica was lost: prompt and output so far, under another number."""
        sequence = self._any(data)
        output = self._emitted(sequence)
        self.client.send(sequence)
        self.open(self._prompt(sequence), output)

    @precondition(lambda self: self.client.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        scheduler = self.client.engine.scheduler
        scheduler._preempt(data.draw(st.sampled_from(scheduler.running)))

    def teardown(self) -> None:
        self.client.send(*self.client.open)
        self.client.step()
        assert self.client.engine.lm.pool.num_free == NUM_BLOCKS

    def _order_verify(self, sequence: int, right: list[bool]) -> None:
        text, done = self._text(sequence), len(self._emitted(sequence))
        tokens = [*text[done:], *[0] * len(right)]
        drafted = [t if keep else (t + 1) % VOCAB_SIZE for t, keep in zip(tokens, right, strict=False)]
        self.client.send(self.client.verify(sequence, *drafted))

    def _check_kv(self, kv: KVSequence) -> None:
        if kv.kv_len:
            stored = stored_kv(self.client.engine.lm, kv, kv.kv_len)
            for mine, fresh in zip(stored, fresh_kv(self.model, kv.token_ids[: kv.kv_len]), strict=True):
                torch.testing.assert_close(mine, fresh, atol=1e-5, rtol=1e-5)

    def _any(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.client.open))

    def _prompt(self, sequence: int) -> tuple[int, ...]:
        opened = self.opened[sequence]
        return opened.token_ids[: opened.num_prompt_tokens]

    def _text(self, sequence: int) -> list[int]:
        return text_after(self.model, self._prompt(sequence))

    def _emitted(self, sequence: int) -> list[int]:
        """All output, what Open brought along included."""
        opened = self.opened[sequence]
        return [*opened.token_ids[opened.num_prompt_tokens :], *self.client.tokens(sequence)]


class LlamaMachine(EngineMachine):
    model = "llama"


class GemmaMachine(EngineMachine):
    model = "gemma3"


LlamaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
GemmaMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestLlama = LlamaMachine.TestCase
TestGemma = GemmaMachine.TestCase
