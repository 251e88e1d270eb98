"""Losslessness, after the fact: whether each token of a text is the target's own pick.

A greedy text is the target's highest logit at each position, a seeded one its pick for the noise of that
seed. Both follow from one plain prefill over the text, whatever was drafted, leased or retried meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode.errors import InvalidArgumentError
from specdecode.lm.runner import Chunk, PagedLM
from specdecode.noise import exponential_noise
from specdecode.records import RecordedTokens
from specdecode.sampling import Window, penalised_logits, probabilities
from specdecode.types import Method

AUDITABLE = (Method.GREEDY, Method.COUPLED)
"""Methods whose texts follow from what was asked; others depend on noise that nobody keeps."""

SMALLEST_MARGIN = 1e-3
"""Between picks that are further apart no float32 arithmetic is undecided."""
_ROUNDINGS = 8.0
_ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class Finding:
    """A token that is not the target's pick here.

    Attributes:
        position: among the output's tokens.
        emitted, expected: token ids.
        margin: by how much the expected one is ahead, in logits (of a seeded text: of noise and logits).
        is_tie: whether that is within what the number format can't tell.
    """

    choice: int
    position: int
    emitted: int
    expected: int
    margin: float
    is_tie: bool


@dataclass(frozen=True)
class Audit:
    """What came of one request.

    Attributes:
        num_tokens: that were checked.
        closest: least margin between the first and the second of all positions; None without any.
    """

    num_tokens: int
    findings: tuple[Finding, ...] = ()
    closest: float | None = None

    @property
    def num_violations(self) -> int:
        """Tokens that are not the target's pick, ties left out."""
        return sum(not finding.is_tie for finding in self.findings)


def audit(lm: PagedLM, method: Method, tokens: RecordedTokens) -> Audit:
    """Scores all choices of a request.

    Args:
        lm: the target; its pool has to hold the longest text.
        method: one of `AUDITABLE`.

    Raises:
        InvalidArgumentError: the text is longer than what the target holds, or has other ids.
    """
    if method not in AUDITABLE:
        raise InvalidArgumentError.of("method", f"{method.value}; only greedy and seeded texts follow")
    findings: list[Finding] = []
    gaps: list[float] = []
    total = 0
    for index, choice in enumerate(tokens.choices):
        output = choice.token_ids
        _check(lm, tokens.prompt, output)
        for start, logits in _scored(lm, tokens.prompt, output):
            own = output[start : start + len(logits)]
            window = Window(tokens.sampling, [*tokens.prompt, *output[:start]], len(tokens.prompt), own[:-1])
            scores = _scores(method, logits, window, tokens.seed, index)
            found, gap = _compare(scores, logits, own, index, start)
            findings += found
            gaps.append(gap)
        total += len(output)
    return Audit(total, tuple(findings), min(gaps, default=None))


def _check(lm: PagedLM, prompt: Sequence[int], output: Sequence[int]) -> None:
    length, largest = len(prompt) + len(output), max((*prompt, *output), default=0)
    if length > lm.max_length:
        raise InvalidArgumentError.of("tokens", f"{length} of them; the target holds {lm.max_length}")
    if largest >= lm.model.vocab_size:
        raise InvalidArgumentError.of("tokens", f"id {largest}; the target has {lm.model.vocab_size} ids")


def _scored(lm: PagedLM, prompt: Sequence[int], output: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(first output position, [R, vocab_size] logits for it and those after), a piece at a time."""
    if not output:
        return
    sequence = lm.new_sequence([*prompt, *output])
    try:
        if len(prompt) > 1:
            lm.forward([Chunk(sequence, list(prompt[:-1]), 0)])
        fed = [prompt[-1], *output[:-1]]
        for start in range(0, len(fed), _ROWS_AT_ONCE):
            piece = fed[start : start + _ROWS_AT_ONCE]
            yield start, lm.forward([Chunk(sequence, piece, len(piece))])
    finally:
        sequence.release()


def _scores(
    method: Method,
    logits: Tensor,  # [R, vocab_size]
    window: Window,
    seed: int,
    choice: int,
) -> Tensor:
    """[R, vocab_size] float64; the highest of a row is the target's pick."""
    if method is Method.GREEDY:
        return penalised_logits(logits, [window]).double()
    p = probabilities(logits.float(), [window]).double()
    first = len(window.token_ids)
    positions = torch.arange(first, first + len(p))[:, None]
    noise = exponential_noise(seed, choice, positions, torch.arange(p.shape[1])[None, :])
    return p.log() - noise.log()


def _compare(
    scores: Tensor,  # [R, vocab_size]
    logits: Tensor,  # [R, vocab_size]
    emitted: Sequence[int],
    choice: int,
    start: int,
) -> tuple[list[Finding], float]:
    """Rows whose pick is another token, and the least gap between first and second."""
    best = scores.topk(2, dim=1)
    own = scores.gather(1, torch.tensor(emitted)[:, None])[:, 0]
    margins = (best.values[:, 0] - own).tolist()
    # A logit is right to a few roundings of its number format.
    resolution = torch.finfo(logits.dtype).eps * _ROUNDINGS
    tolerances = (logits.float().amax(1).abs() * resolution).clamp(min=SMALLEST_MARGIN).tolist()
    picks = best.indices[:, 0].tolist()
    findings = [
        Finding(choice, start + row, token, pick, margin, margin <= tolerance)
        for row, (token, pick, margin, tolerance) in enumerate(
            zip(emitted, picks, margins, tolerances, strict=True)
        )
        if margin > 0
    ]
    return findings, float((best.values[:, 0] - best.values[:, 1]).min())
