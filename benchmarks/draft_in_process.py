"""The draft model beside the target in one process: what its drafts are worth, and what its steps cost."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from benchmarks.draft_figures import AcceptanceRun, Kind, StepRun
from draft_service.drafting import SequenceKey
from draft_service.model import DraftLimits, ModelDrafter, ModelSequence
from specdecode.lm.model import load_model
from specdecode.lm.runner import PagedLM
from specdecode.models import resolve
from specdecode.types import (
    DecodeFrame,
    Draft,
    DrafterKind,
    Lease,
    Method,
    OpenDraft,
    OpenSequence,
    Propose,
    SamplingParams,
    StepResult,
    Verify,
)
from target_service.engine import Engine

NUM_BLOCKS = 2048
STEP_PROMPT_TOKENS, STEP_TOKENS, STEP_ROUNDS = 60, 24, 6
STEP_METHODS = {
    "greedy": (Method.GREEDY, 0.0),
    "sampled": (Method.REJECTION, 0.8),
    "seeded": (Method.COUPLED, 0.8),
}

Tokens = tuple[int, ...]


@dataclass
class _Text:
    """One prompt's sequence on both sides, and what its rounds gave."""

    opened: OpenSequence
    draft: ModelSequence
    output: list[int]
    known: int
    results: list[StepResult]

    @property
    def committed_length(self) -> int:
        return len(self.opened.token_ids) + len(self.output)


class Pair:
    """A target and its draft model, driven as the router drives them, without messages.

    Args:
        eos_token_ids: end a text.
    """

    def __init__(
        self, target: str, draft: str, dtype: torch.dtype, device: str, eos_token_ids: Sequence[int]
    ) -> None:
        self._engine = Engine(
            PagedLM(load_model(resolve(target), dtype, device), NUM_BLOCKS),
            generator=torch.Generator().manual_seed(1),
        )
        self._drafter = ModelDrafter(
            PagedLM(load_model(resolve(draft), dtype, device), NUM_BLOCKS),
            DraftLimits(),
            torch.Generator().manual_seed(2),
        )
        self._eos = tuple(eos_token_ids)
        self._numbers = count(1)
        self._streams = count(1)

    def accept(
        self,
        kind: Kind,
        prompts: Sequence[Tokens],
        temperature: float,
        num_draft_tokens: int,
        max_tokens: int,
    ) -> list[AcceptanceRun]:
        """Rounds of all prompts side by side, each of `num_draft_tokens` drafts that feed on themselves."""
        method = Method.REJECTION if temperature else Method.GREEDY
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=self._eos)
        stream = next(self._streams)
        texts = {n: self._open(n, stream, prompt, sampling, method) for n, prompt in enumerate(prompts)}
        self._engine.apply(stream, DecodeFrame(opens=tuple(text.opened for text in texts.values())))
        running = dict(texts)
        while running:
            verifies = [
                Verify(draft.sequence, draft.committed_length, draft.token_ids, draft.q)
                for draft in self._draft(running, num_draft_tokens)
            ]
            self._engine.apply(stream, DecodeFrame(verifies=tuple(verifies)))
            for number, result in self._results(len(verifies)):
                text = running[number]
                text.results.append(result)
                text.output += result.token_ids
                if result.ended:
                    text.draft.close()
                    del running[number]
        return [
            _acceptance_of(kind, temperature, number, text.results, num_draft_tokens)
            for number, text in texts.items()
        ]

    def _open(
        self, number: int, stream: int, prompt: Tokens, sampling: SamplingParams, method: Method
    ) -> _Text:
        salt = f"{stream}/{number}".encode()
        order = OpenDraft(number, prompt, len(prompt), sampling, method, DrafterKind.MODEL, cache_salt=salt)
        draft = self._drafter.open(SequenceKey(stream, number), order)
        opened = OpenSequence(number, prompt, len(prompt), sampling, method, cache_salt=salt)
        return _Text(opened, draft, [], len(prompt), [])

    def _draft(self, texts: dict[int, _Text], num_draft_tokens: int) -> list[Draft]:
        for number, text in texts.items():
            new = tuple(text.output[text.known - len(text.opened.token_ids) :])
            text.draft.propose(Propose(number, text.known, new, num_draft_tokens))
            text.known = text.committed_length
        drafts: list[Draft] = []
        while self._drafter.busy:
            drafts += (answer.draft for answer in self._drafter.advance())
        for draft in drafts:
            if draft.error is not None:
                raise draft.error
        return drafts

    def _results(self, expected: int) -> Iterator[tuple[int, StepResult]]:
        """One result of each sequence that has an order."""
        found = 0
        while found < expected:
            for key, result in self._engine.step().results:
                if result.error is not None:
                    raise result.error
                found += 1
                yield key.sequence, result

    def step(self, name: str, turn: int, num_draft_tokens: int) -> StepRun:
        """A draft step, of whole rounds, beside a plain step of the target; medians."""
        method, temperature = STEP_METHODS[name]
        drawn = random.Random(turn)
        size = min(self._engine.lm.model.vocab_size, self._drafter.lm.model.vocab_size)
        prompt = tuple(drawn.randrange(100, size) for _ in range(STEP_PROMPT_TOKENS))
        target = statistics.median(self._plain_steps(prompt, method, temperature))
        sampling = SamplingParams(temperature=temperature)
        key = SequenceKey(next(self._streams), 1)
        order = OpenDraft(1, prompt, len(prompt), sampling, method, DrafterKind.MODEL, seed=turn)
        sequence = self._drafter.open(key, order)
        while self._drafter.busy:
            self._drafter.advance()
        seconds = []
        new: Tokens = ()
        for _ in range(STEP_ROUNDS):
            began = time.perf_counter()
            sequence.propose(Propose(1, sequence.committed_length, new, num_draft_tokens))
            while self._drafter.busy:
                self._drafter.advance()
            seconds.append(time.perf_counter() - began)
            # As after a rejection of the first draft.
            new = (drawn.randrange(100, size),)
        sequence.close()
        return StepRun(name, turn, 1e3 * statistics.median(seconds) / num_draft_tokens, 1e3 * target)

    def _plain_steps(self, prompt: Tokens, method: Method, temperature: float) -> list[float]:
        sampling = SamplingParams(temperature=temperature, max_tokens=STEP_TOKENS)
        stream = next(self._streams)
        opened = OpenSequence(1, prompt, len(prompt), sampling, method, seed=stream)
        lease = Lease(1, len(prompt), STEP_TOKENS)
        self._engine.apply(stream, DecodeFrame(opens=(opened,), leases=(lease,)))
        seconds = []
        while self._engine.sequences:
            load = self._engine.step().load
            if load.tokens_in_flight == load.num_rows == 1:
                seconds.append(load.step_seconds)
        return seconds


def _acceptance_of(
    kind: Kind, temperature: float, prompt: int, results: Sequence[StepResult], num_draft_tokens: int
) -> AcceptanceRun:
    """Sums over the rounds in which all drafts were verified: the last ones of a text are cut short."""
    whole = [result for result in results if result.num_drafted == num_draft_tokens] or list(results)
    return AcceptanceRun(
        kind=kind,
        temperature=temperature,
        prompt=prompt,
        num_rounds=len(whole),
        num_emitted=sum(len(result.token_ids) for result in whole),
        tested=[round(sum(_at(r.tested, i) for r in whole), 4) for i in range(num_draft_tokens)],
        passed=[round(sum(_at(r.passed, i) for r in whole), 4) for i in range(num_draft_tokens)],
    )


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if index < len(values) else 0.0
