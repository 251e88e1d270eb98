from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from router.drafts import fault_of
from specdecode.types import Draft, Method, SparseDistributions

VOCAB_SIZE = 10


def q_of(*positions: Sequence[tuple[int, float]]) -> SparseDistributions:
    pairs = [pair for position in positions for pair in position]
    return SparseDistributions(
        sizes=np.array([len(position) for position in positions], dtype=np.int32),
        token_ids=np.array([token for token, _ in pairs], dtype=np.int32),
        probs=np.array([prob for _, prob in pairs], dtype=np.float32),
    )


GOOD_Q = q_of([(3, 0.25), (7, 0.75)], [(4, 1.0)])


def fault(
    token_ids: tuple[int, ...] = (3, 4), q: SparseDistributions | None = GOOD_Q, **changes: Any
) -> str | None:
    arguments = {"asked_length": 5, "num_asked": 2, "vocab_size": VOCAB_SIZE, "method": Method.REJECTION}
    return fault_of(Draft(1, 5, token_ids, q), **(arguments | changes))


@pytest.mark.parametrize(
    "accepted",
    [
        {},
        {"method": Method.BLOCK},
        {"q": None},
        {"q": None, "method": Method.GREEDY},
        {"token_ids": (), "q": None},
        {"token_ids": (), "q": q_of()},
        {"token_ids": (7,), "q": q_of([(3, 0.25), (7, 0.75)])},
        {"q": q_of([(3, 0.250004), (7, 0.75)], [(4, 1.0)])},
    ],
)
def test_what_could_be_an_answer_is_used(accepted: dict[str, Any]) -> None:
    assert fault(**accepted) is None


@pytest.mark.parametrize(
    ("refused", "what"),
    [
        ({"asked_length": 6}, "asked for after"),
        ({"num_asked": 1}, "asked for"),
        ({"token_ids": (3, VOCAB_SIZE), "q": None}, "vocabulary"),
        ({"token_ids": (-1, 3), "q": None}, "vocabulary"),
        ({"method": Method.GREEDY}, "has none"),
        ({"method": Method.COUPLED}, "has none"),
        ({"q": q_of([(3, 1.0)])}, "sizes"),
        ({"q": q_of([(3, 0.25), (7, 0.75)], [])}, "support"),
        ({"q": q_of([(3, 0.25), (VOCAB_SIZE, 0.75)], [(4, 1.0)])}, "vocabulary"),
        ({"q": q_of([(3, 0.25), (-1, 0.75)], [(4, 1.0)])}, "vocabulary"),
        ({"q": q_of([(3, math.nan), (7, 0.75)], [(4, 1.0)])}, "finite"),
        ({"q": q_of([(3, math.inf), (7, 0.75)], [(4, 1.0)])}, "finite"),
        ({"q": q_of([(3, -0.25), (7, 1.25)], [(4, 1.0)])}, "negative"),
        ({"q": q_of([(3, 0.2501), (7, 0.75)], [(4, 1.0)])}, "mass"),
        ({"q": q_of([(3, 0.25), (7, 0.75)], [(4, 0.999)])}, "mass"),
        ({"q": q_of([(3, 0.25), (3, 0.75)], [(4, 1.0)])}, "twice"),
        ({"q": q_of([(3, 0.25), (7, 0.75)], [(5, 1.0)])}, "outside q's support"),
        ({"q": q_of([(3, 0.0), (7, 1.0)], [(4, 1.0)])}, "outside q's support"),
    ],
)
def test_what_could_not_be_an_answer_is_told_apart(refused: dict[str, Any], what: str) -> None:
    found = fault(**refused)
    assert found is not None
    assert what in found
