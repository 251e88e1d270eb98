"""How good a draft is on texts that it was not trained on: α, greedy agreement, and what rounds emit.

Teacher-forced figures are taken at every position of an answer. What a round emits under greedy follows from
them exactly, since a draft that was accepted is the target's own token: the rounds of every answer are gone
through one after another. Under sampling a draft feeds on tokens of its own that the target would not have
chosen, so drafts are drawn, the target reads them, and each position counts as far as those before it were
accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdecode.distill.batches import batch_of, epoch_of
from specdecode.distill.corpus import Text
from specdecode.distill.student import Student

_ROWS_AT_ONCE = 128
_NUM_POSITIONS = 8192


@dataclass
class Tally:
    """Sums over positions of some kind of text.

    Attributes:
        accepted: Σ α at the text's own temperature; at 0 that is agreement.
        accepted_hot: Σ α at temperature 1, whatever the text's.
        rounds: greedy rounds that the positions take.
        survived: of all starts of a round, how many had more than i drafts accepted, for each i.
    """

    positions: int = 0
    accepted: float = 0.0
    accepted_hot: float = 0.0
    agreed: int = 0
    rounds: int = 0
    survived: list[int] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Adds another's sums."""
        self.positions += other.positions
        self.accepted += other.accepted
        self.accepted_hot += other.accepted_hot
        self.agreed += other.agreed
        self.rounds += other.rounds
        old = self.survived or [0] * len(other.survived)
        self.survived = [a + b for a, b in zip(old, other.survived, strict=True)]

    def figures(self) -> dict[str, Any]:
        """Means, for the report."""
        n = max(self.positions, 1)
        before = [self.rounds, *self.survived[:-1]]
        return {
            "positions": self.positions,
            "alpha": round(self.accepted / n, 4),
            "alpha_temperature_1": round(self.accepted_hot / n, 4),
            "greedy_agreement": round(self.agreed / n, 4),
            "greedy_emitted_per_round": round(self.positions / max(self.rounds, 1), 4),
            "greedy_agreement_by_position": [
                round(kept / max(asked, 1), 4) for kept, asked in zip(self.survived, before, strict=True)
            ],
        }


@torch.no_grad()
def tallies(
    student: Student,
    texts: Sequence[Text],
    head: Tensor,  # [V, d], the target's
    num_draft_tokens: int,
    dtype: torch.dtype,
) -> dict[str, Tally]:
    """Sums over all texts, for each kind, each temperature, and each pair of both."""
    student.module.eval()
    found: dict[str, Tally] = {}
    for indices in epoch_of(texts, _NUM_POSITIONS, 0, 0):
        some = [texts[index] for index in indices]
        batch = batch_of(some, student, head.device)
        hidden = student.hidden(batch.token_ids, dtype).flatten(0, 1)[batch.rows]
        parts = torch.split(hidden, [len(text.answer) for text in some])
        for text, states in zip(some, parts, strict=True):
            tally = _tally(student, text, states, head, num_draft_tokens)
            kind, heat = text.kind.value, f"temperature {text.temperature:g}"
            for name in ("all", kind, heat, f"{kind}, {heat}"):
                found.setdefault(name, Tally()).add(tally)
    student.module.train()
    return dict(sorted(found.items()))


def _tally(student: Student, text: Text, states: Tensor, head: Tensor, num_draft_tokens: int) -> Tally:
    tally, agreed = Tally(positions=len(text.answer)), []
    for start in range(0, len(text.answer), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        scores = (text.hidden[rows].to(head.device) @ head.T).float()
        logits = states[rows] @ student.head.T
        same = scores.argmax(dim=1) == student.vocabulary[logits.argmax(dim=1)]
        hot = overlap(scores, logits, student.vocabulary, 1.0)
        own = overlap(scores, logits, student.vocabulary, text.temperature) if text.temperature else same
        tally.accepted_hot += float(hot.sum())
        tally.accepted += float(own.sum())
        agreed += same.tolist()
    tally.agreed = sum(agreed)
    accepted = list(greedy_rounds(agreed, num_draft_tokens))
    tally.rounds = len(accepted)
    tally.survived = [sum(a > i for a in accepted) for i in range(num_draft_tokens)]
    return tally


def overlap(
    scores: Tensor,  # [R, V] the target's logits
    logits: Tensor,  # [R, K] the draft's
    vocabulary: Tensor,  # [K]
    temperature: float,
) -> Tensor:
    """α = Σ min(p, q) of each row at a temperature above 0: [R]."""
    p = torch.softmax(scores / temperature, dim=1)[:, vocabulary]
    return torch.minimum(p, torch.softmax(logits / temperature, dim=1)).sum(dim=1)


def greedy_rounds(agreed: Sequence[bool], num_draft_tokens: int) -> Iterable[int]:
    """Drafts accepted in each round of an answer, from whether the draft's pick is the target's at each
    position.
    """
    at = 0
    while at < len(agreed):
        accepted = 0
        while accepted < num_draft_tokens and at + accepted < len(agreed) and agreed[at + accepted]:
            accepted += 1
        yield accepted
        at += accepted + 1


@torch.no_grad()
def self_fed_alpha(
    student: Student,
    target: Any,
    texts: Sequence[Text],
    num_draft_tokens: int,
    temperature: float,
    seed: int,
) -> list[float]:
    """α_i at draft positions 0 …, drafts drawn one after another from the middle of each answer.

    Position i is weighted by how likely those before it were accepted, as in an engine's own estimates.
    """
    generator, device = torch.Generator().manual_seed(seed), student.head.device
    student.module.eval()
    sums = torch.zeros(2, num_draft_tokens)
    for text in texts:
        start = text.num_prompt_tokens + int(torch.randint(len(text.answer), (1,), generator=generator))
        ids = list(text.token_ids[:start])
        drafts = []
        for _ in range(num_draft_tokens):
            states = student.hidden(torch.tensor([ids], device=device), torch.float32)[0, -1:]
            q = torch.softmax(states @ student.head.T / temperature, dim=1)[0].cpu()
            column = int(torch.multinomial(q, 1, generator=generator))
            drafts.append((q, column))
            ids.append(int(student.vocabulary[column]))
        read = torch.tensor([ids], device=device)
        scores = target(read, logits_to_keep=num_draft_tokens + 1).logits[0, :-1].float()
        p = torch.softmax(scores / temperature, dim=1)[:, student.vocabulary].cpu()
        weight = 1.0
        for position, (q_row, column) in enumerate(drafts):
            alpha = torch.minimum(p[position], q_row).sum()
            sums[0, position] += weight * alpha
            sums[1, position] += weight
            weight *= min(1.0, float(p[position, column] / q_row[column]))
    student.module.train()
    return [round(float(a), 4) for a in sums[0] / sums[1].clamp(min=1e-9)]
