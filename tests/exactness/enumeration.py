"""The exact distribution of what one verification emits, found by enumeration instead of sampling.

Every path the draft can take is weighted by its probability. For a given path the code is a function of its
coins (one u per draft, one for the last token) that is constant on the cells of a grid: the coins are cut at
the thresholds that the maths, written out again below in plain Python, gives. The real code is called at two
points of every cell, close to opposite corners; it must answer the same at both, and that counts with the
cell's volume.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from math import prod

import torch

from specdecode.types import Method
from specdecode.verification import Drafts, Verified, verify_block, verify_picks, verify_rejection
from tests.exactness.table_model import TableModel, Tokens

NARROWEST = 1e-13
"""Cells narrower than this in one coin are skipped: both of their corners would be rounding."""
CORNER = 1e-3
"""How far from a cell's two corners the code is called, as a part of the cell's width."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Path:
    """One way of drafting: `tokens` with probability `weight`; p has one row more than there are tokens."""

    tokens: Tokens
    weight: float
    p: list[Sequence[float]]
    q: list[Sequence[float]]


@dataclass(frozen=True)
class Cell:
    """Coins of one path between which the outcome can't change."""

    path: int
    coins: tuple[Interval, ...]
    """One interval per draft, then that of the sample."""
    volume: float
    """Path's weight included."""


@dataclass
class Outcome:
    """Exact distribution of one round."""

    emitted: dict[Tokens, float] = field(default_factory=lambda: defaultdict(float))
    accepted: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tested: list[float] = field(default_factory=list)
    """Means of the reported `tested` and `passed`."""
    passed: list[float] = field(default_factory=list)

    @property
    def mean_accepted(self) -> float:
        return sum(count * weight for count, weight in self.accepted.items())

    def at_least(self, count: int) -> float:
        """Probability that `count` drafts or more are accepted."""
        return sum(weight for accepted, weight in self.accepted.items() if accepted >= count)


def enumerate_round(
    method: Method,
    target: TableModel,
    draft: TableModel,
    num_draft_tokens: int,
    *,
    keep: Callable[[Tokens], int] = len,
    sent: TableModel | None = None,
    trust_draft: bool = True,
) -> Outcome:
    """What one round emits, with what probability.

    `keep` tells how many of a path's drafted tokens are sent, `sent` whose distributions go with them as q
    (the draft's own by default); without `trust_draft` the drafts are verified as one-hot.
    """
    paths = [
        path_of(target, sent or draft, tokens[: keep(tokens)], weight, trust_draft=trust_draft)
        for tokens, weight in draft.paths(num_draft_tokens)
    ]
    cells = [cell for index, path in enumerate(paths) for cell in _cells(method, index, path)]
    near, far = (_verify(method, paths, cells, corner) for corner in (CORNER, 1 - CORNER))
    assert near.accepted.equal(far.accepted), "accepted changes inside a cell"
    assert near.next_token.equal(far.next_token), "next token changes inside a cell"
    return _outcome(paths, cells, near)


def extended(emitted: dict[Tokens, float], target: TableModel, length: int) -> dict[Tokens, float]:
    """Distribution over sequences of `length` tokens: what was emitted, continued by the target itself."""
    return {
        tokens: sum(
            emitted.get(tokens[:count], 0.0) * target.probability(tokens[count:], tokens[:count])
            for count in range(1, length + 1)
        )
        for tokens in product(range(target.vocab_size), repeat=length)
    }


def distance_from_target(emitted: dict[Tokens, float], target: TableModel, length: int) -> float:
    """Total variation between what was emitted, continued by the target, and the target's own."""
    distribution = extended(emitted, target, length)
    return 0.5 * sum(abs(mass - target.probability(tokens)) for tokens, mass in distribution.items())


def block_chances(path: Path) -> tuple[list[float], list[float]]:
    """p_0 … p_γ and h_1 … h_γ of block verification."""
    reach = [1.0]
    for index, token in enumerate(path.tokens):
        reach.append(min(1.0, reach[-1] * path.p[index][token] / path.q[index][token]))
    chances = []
    for index in range(1, len(path.tokens)):
        left = sum(_residual(path, index, reach[index]))
        chances.append(left / (left + 1 - reach[index]) if left > 0 else 0.0)
    return reach, [*chances, reach[-1]] if path.tokens else []


def path_of(
    target: TableModel, draft: TableModel, tokens: Tokens, weight: float, *, trust_draft: bool = True
) -> Path:
    """The distributions along drafted `tokens`."""

    def q(index: int) -> Sequence[float]:
        if trust_draft:
            return draft.next(tokens[:index])
        return [float(token == tokens[index]) for token in range(draft.vocab_size)]

    p = [target.next(tokens[:count]) for count in range(len(tokens) + 1)]
    return Path(tokens, weight, p, [q(index) for index in range(len(tokens))])


def _residual(path: Path, index: int, scale: float) -> list[float]:
    """max(scale·p − q, 0) after `index` drafts, or p after all of them."""
    if index == len(path.tokens):
        return list(path.p[index])
    return [max(scale * p - q, 0.0) for p, q in zip(path.p[index], path.q[index], strict=True)]


def _cells(method: Method, index: int, path: Path) -> Iterator[Cell]:
    if method is Method.GREEDY:
        yield Cell(index, tuple((0.0, 1.0) for _ in range(len(path.tokens) + 1)), path.weight)
        return
    reach = [1.0] * (len(path.tokens) + 1)
    thresholds = [min(1.0, path.p[i][x] / path.q[i][x]) for i, x in enumerate(path.tokens)]
    if method is Method.BLOCK:
        reach, thresholds = block_chances(path)
    for heads in product((True, False), repeat=len(path.tokens)):
        coins = [(0.0, t) if head else (t, 1.0) for head, t in zip(heads, thresholds, strict=True)]
        accepted = _last(heads) if method is Method.BLOCK else (*heads, False).index(False)
        for sample in _sample_intervals(_residual(path, accepted, reach[accepted])):
            widths = [upper - lower for lower, upper in (*coins, sample)]
            if min(widths) > NARROWEST:
                yield Cell(index, (*coins, sample), path.weight * prod(widths))


def _last(heads: Sequence[bool]) -> int:
    return max((number for number, head in enumerate(heads, 1) if head), default=0)


def _sample_intervals(weights: Sequence[float]) -> list[Interval]:
    total = sum(weights)
    return list(pairwise(bound / total for bound in accumulate(weights, initial=0.0))) if total > 0 else []


def _verify(method: Method, paths: list[Path], cells: list[Cell], corner: float) -> Verified:
    """The real code on all cells in one ragged batch."""
    p = torch.tensor([row for path in paths for row in path.p], dtype=torch.float64)
    first_rows = torch.tensor([*accumulate((len(path.p) for path in paths), initial=0)])
    owner = torch.tensor([cell.path for cell in cells])
    drafts = _drafts(paths)
    batch = Drafts(
        *(x[owner] for x in (drafts.token_ids, drafts.lengths, drafts.q_token_ids, drafts.q_probs))
    )
    noise = torch.full((len(cells), batch.token_ids.shape[1] + 1), torch.nan, dtype=torch.float64)
    for row, cell in enumerate(cells):
        points = [lower + corner * (upper - lower) for lower, upper in cell.coins]
        noise[row, : len(points) - 1] = torch.tensor(points[:-1], dtype=torch.float64)
        noise[row, -1] = points[-1]
    if method is Method.GREEDY:
        return verify_picks(p.argmax(dim=1), first_rows[owner], batch)
    verify = verify_block if method is Method.BLOCK else verify_rejection
    return verify(p, first_rows[owner], batch, noise[:, :-1], noise[:, -1])


def _drafts(paths: list[Path]) -> Drafts:
    """All paths as drafts: q by its support, unused entries and padded positions filled with nonsense."""
    num_positions = max(len(path.tokens) for path in paths)
    num_entries = max((sum(x > 0 for x in q) for path in paths for q in path.q), default=0)
    token_ids = torch.full((len(paths), num_positions), -7)
    q_token_ids = torch.zeros(len(paths), num_positions, num_entries, dtype=torch.int64)
    q_probs = torch.full(q_token_ids.shape, torch.nan, dtype=torch.float64)
    for row, path in enumerate(paths):
        for index, (token, q) in enumerate(zip(path.tokens, path.q, strict=True)):
            support = [x for x, mass in enumerate(q) if mass > 0]
            token_ids[row, index] = token
            q_token_ids[row, index, : len(support)] = torch.tensor(support)
            q_probs[row, index] = 0.0
            q_probs[row, index, : len(support)] = torch.tensor([q[x] for x in support], dtype=torch.float64)
    lengths = torch.tensor([len(path.tokens) for path in paths])
    return Drafts(token_ids, lengths, q_token_ids, q_probs)


def _outcome(paths: list[Path], cells: list[Cell], verified: Verified) -> Outcome:
    outcome = Outcome()
    for cell, accepted, token in zip(
        cells, verified.accepted.tolist(), verified.next_token.tolist(), strict=True
    ):
        outcome.emitted[(*paths[cell.path].tokens[:accepted], token)] += cell.volume
        outcome.accepted[accepted] += cell.volume
    volumes = torch.tensor([cell.volume for cell in cells], dtype=torch.float64)
    outcome.tested = (volumes @ verified.tested).tolist()
    outcome.passed = (volumes @ verified.passed).tolist()
    return outcome
