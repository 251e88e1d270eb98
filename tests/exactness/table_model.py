"""Language models that are explicit tables: every distribution they imply can be enumerated exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class TableModel:
    """Next-token distributions by the last `depth` tokens; shorter histories have entries of their own.

    Attributes:
        vocab_size: token ids are 0 … vocab_size − 1.
        depth: how many of the last tokens the distribution depends on.
        table: one distribution of `vocab_size` probabilities for every history of 0 … `depth` tokens.
    """

    vocab_size: int
    depth: int
    table: Mapping[Tokens, Sequence[float]]

    def next(self, history: Sequence[int]) -> Sequence[float]:
        """The distribution after `history`, of any length."""
        return self.table[tuple(history[max(0, len(history) - self.depth) :])]

    def greedy(self, history: Sequence[int]) -> int:
        """The most probable next token, the lowest of several."""
        distribution = self.next(history)
        return max(range(self.vocab_size), key=lambda token: (distribution[token], -token))

    def probability(self, tokens: Tokens, history: Tokens = ()) -> float:
        """Probability of continuing `history` by `tokens`."""
        result = 1.0
        for index, token in enumerate(tokens):
            result *= self.next(history + tokens[:index])[token]
        return result

    def paths(self, length: int) -> Iterator[tuple[Tokens, float]]:
        """Every sequence of `length` tokens that has probability, with it."""
        for tokens in product(range(self.vocab_size), repeat=length):
            weight = self.probability(tokens)
            if weight > 0:
                yield tokens, weight

    @classmethod
    def random(
        cls, seed: int, vocab_size: int, depth: int, *, support: int | None = None, sharpness: float = 1.5
    ) -> TableModel:
        """Random tables; with `support`, all but that many random tokens of each entry have probability 0."""
        rng = np.random.default_rng(seed)

        def distribution() -> list[float]:
            weights = np.exp(sharpness * rng.standard_normal(vocab_size))
            if support is not None:
                weights[rng.permutation(vocab_size)[support:]] = 0.0
            return list((weights / weights.sum()).tolist())

        return cls(vocab_size, depth, {history: distribution() for history in _histories(vocab_size, depth)})

    @classmethod
    def constant(cls, distribution: Sequence[float]) -> TableModel:
        """The same distribution after every history."""
        return cls(len(distribution), 0, {(): distribution})

    def one_hot(self) -> TableModel:
        """The deterministic model that always continues with this one's greedy token."""

        def distribution(history: Tokens) -> list[float]:
            best = self.greedy(history)
            return [float(token == best) for token in range(self.vocab_size)]

        return TableModel(
            self.vocab_size, self.depth, {history: distribution(history) for history in self.table}
        )


def _histories(vocab_size: int, depth: int) -> Iterator[Tokens]:
    for length in range(depth + 1):
        yield from product(range(vocab_size), repeat=length)
