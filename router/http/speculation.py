"""What is told of speculation: of a request in sums, and of tokens and rounds where that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from router.http.bodies import SpeculativeDecoding
from router.http.logprobs import LEAST_LOGPROB, token_text
from router.text import Tokenizer
from specdecode.figures import Figures
from specdecode.requests import EmittedToken
from specdecode.types import RoundRecord, Usage


def metrics_of(usage: Usage, figures: Iterable[Figures]) -> dict[str, Any]:
    """Sums over a request, the first ones by vLLM's names for them; a spec step is a round with drafts."""
    by_length: dict[int, list[int]] = {}
    for entry in figures:
        for num_drafted, counts in enumerate(entry.runs):
            if num_drafted and any(counts):
                _add(by_length.setdefault(num_drafted, []), counts)
    histogram: list[int] = []
    for own in by_length.values():
        _add(histogram, own)
    num_steps = sum(histogram)
    num_drafted = sum(length * sum(counts) for length, counts in by_length.items())
    num_accepted = sum(index * count for index, count in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else None,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {
            str(length): by_length[length] for length in sorted(by_length)
        },
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": max(by_length, default=0),
        **{name: value for name, value in vars(usage).items() if name not in _TOLD_ELSEWHERE},
    }


_TOLD_ELSEWHERE = ("num_prompt_tokens", "num_cached_tokens", "num_drafted")


def _add(total: list[int], counts: Sequence[int]) -> None:
    total.extend([0] * (len(counts) - len(total)))
    for index, count in enumerate(counts):
        total[index] += count


def details_of(
    extension: SpeculativeDecoding,
    tokenizer: Tokenizer,
    tokens: Sequence[EmittedToken],
    rounds: Sequence[RoundRecord],
) -> dict[str, Any]:
    """What a choice tells of its tokens and rounds; empty where nothing was asked for or came."""
    told: dict[str, Any] = {}
    if extension.include_tokens and tokens:
        told["tokens"] = [
            {
                "id": token_id,
                "text": token_text(tokenizer, token_id),
                "bytes": list(tokenizer.token_bytes(token_id)),
                "origin": origin.value,
                "logprob": None if told is None else max(told.logprob, LEAST_LOGPROB),
            }
            for token_id, origin, told in tokens
        ]
    if extension.include_rounds and rounds:
        told["rounds"] = list(map(_round, rounds))
    return told


def _round(record: RoundRecord) -> dict[str, Any]:
    return {
        **vars(record),
        "last_origin": record.last_origin.value,
        "drafter": None if record.drafter is None else record.drafter.value,
        "times": vars(record.times),
    }
