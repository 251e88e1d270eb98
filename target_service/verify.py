"""From a step's logits to what each window emits: numerical check, verification by method, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdecode.errors import NumericalError, SpecdecodeError
from specdecode.lm.cpu import Kernels, SamplingKernels
from specdecode.sampling import Window, coupled_tokens, greedy_tokens, probabilities, token_logprobs
from specdecode.types import Method, Origin, TokenLogprobs
from specdecode.verification import Drafts, Verified, verify_block, verify_picks, verify_rejection
from target_service.sequence import Work


@dataclass(frozen=True)
class Outcome:
    """What one window emits before stop ids cut it: `accepted` drafts and one more token, or an error."""

    token_ids: list[int]
    num_accepted: int = 0
    tested: tuple[float, ...] = ()
    passed: tuple[float, ...] = ()
    error: SpecdecodeError | None = None

    def origins(self, num_drafted: int) -> list[Origin]:
        """Origin of each token."""
        if num_drafted == 0:
            return [Origin.PLAIN]
        last = Origin.BONUS if self.num_accepted == num_drafted else Origin.RECOVERED
        return [Origin.ACCEPTED] * self.num_accepted + [last]


def first_rows(works: Sequence[Work]) -> list[int]:
    """Index of each window's first row among the step's logits."""
    rows, end = [], 0
    for work in works:
        rows.append(end)
        end += work.chunk.num_logits
    return rows


class Verifier:
    """Verifies all windows of a step, one call of the verification per method.

    Args:
        generator: noise of `rejection` and `block`; independent of whatever drafters use.
        kernels: for logits on a CPU.
    """

    def __init__(self, generator: torch.Generator, kernels: Kernels | None = None) -> None:
        self._generator = generator
        self._kernels = kernels

    def verify(
        self,
        logits: Tensor,  # [R, vocab_size]
        works: Sequence[Work],
    ) -> list[Outcome]:
        """One outcome per window; rows of a window are consecutive, in the order of `works`.

        A row that is not finite is an error only where a token would come from it or from a row after it:
        a draft that the model has no answer to must not end a text that goes on without it.
        """
        starts = first_rows(works)
        best, finite = self._look_over(logits)
        broken = _first_broken(finite, works, starts)
        if broken:
            # Any distribution will do there: what is emitted before does not depend on it.
            logits = logits.masked_fill(~finite[:, None], 0.0)
        outcomes = [Outcome([])] * len(works)
        for method in Method:
            chosen = [i for i, w in enumerate(works) if w.sequence.opened.method is method]
            if chosen:
                group = [works[i] for i in chosen]
                rows = _rows_of(group, [starts[i] for i in chosen], len(works), logits.device)
                own = _Rows(_pick(logits, rows), None if best is None else _pick(best, rows))
                for i, outcome in zip(chosen, self._verify_method(method, own, group), strict=True):
                    outcomes[i] = outcome
        for i, first in broken.items():
            if outcomes[i].num_accepted >= first:
                outcomes[i] = Outcome([], error=NumericalError("the model's logits are not finite"))
        return outcomes

    def _look_over(
        self,
        logits: Tensor,  # [R, vocab_size]
    ) -> tuple[Tensor | None, Tensor]:
        """[R] int64 the highest logit's id, where it costs nothing more; [R] bool whether all are finite."""
        if self._kernels is not None and logits.dtype == self._kernels.dtype:
            return self._kernels.best_tokens(logits)
        # A sum is one pass over the rows and keeps every NaN and infinity.
        return None, logits.sum(-1, dtype=torch.float32).isfinite()

    def _verify_method(
        self,
        method: Method,
        rows: _Rows,
        works: Sequence[Work],
    ) -> list[Outcome]:
        windows = [_window(work) for work in works]
        logits = rows.logits
        drafts = _drafts(works, logits.device)
        kernels = None if self._kernels is None else self._kernels.sampling
        first_row = torch.tensor(first_rows(works), device=logits.device)
        if method is Method.GREEDY:
            plain = rows.best is not None and not any(window.adjusts_logits for window in windows)
            picks = rows.best if plain and rows.best is not None else greedy_tokens(logits, windows)
            verified = verify_picks(picks, first_row, drafts)
        elif method is Method.COUPLED:
            picks = _coupled_picks(probabilities(logits, windows, kernels), works, kernels)
            verified = verify_picks(picks, first_row, drafts)
        else:
            rule = verify_rejection if method is Method.REJECTION else verify_block
            accept, sample = self._noise(drafts.token_ids.shape)
            p = probabilities(logits, windows, kernels)
            sampler = kernels.residual_tokens if kernels is not None and p.dtype == torch.float32 else None
            verified = rule(p, first_row, drafts, accept.to(p.device), sample.to(p.device), sampler)
        return _outcomes(verified, works)

    def _noise(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        accept = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return accept, torch.rand(shape[0], generator=self._generator, dtype=torch.float64)


def window_logprobs(
    logits: Tensor,  # [γ + 1, vocab_size]
    token_ids: list[int],
    num_top: int,
) -> tuple[TokenLogprobs, ...]:
    """Logprobs of a window's emitted tokens: token i belongs to row i."""
    ids = torch.tensor(token_ids, device=logits.device)
    return tuple(token_logprobs(logits[: len(token_ids)], ids, num_top))


@dataclass(frozen=True)
class _Rows:
    """A method's rows: [R, vocab_size] logits, and [R] int64 the highest one's id where it is known."""

    logits: Tensor
    best: Tensor | None


def _first_broken(
    finite: Tensor,  # [R] bool
    works: Sequence[Work],
    starts: Sequence[int],
) -> dict[int, int]:
    """The first row that is not finite of each window that has one."""
    if bool(finite.all()):
        return {}
    fine = finite.tolist()
    windows = [fine[start : start + w.chunk.num_logits] for w, start in zip(works, starts, strict=True)]
    return {i: rows.index(False) for i, rows in enumerate(windows) if False in rows}


def _rows_of(
    group: Sequence[Work], starts: Sequence[int], num_works: int, device: torch.device
) -> Tensor | None:
    """[R'] int64 the rows of a group's windows; None for all."""
    if len(group) == num_works:
        return None
    rows = [
        r for w, start in zip(group, starts, strict=True) for r in range(start, start + w.chunk.num_logits)
    ]
    return torch.tensor(rows, device=device)


def _pick(
    values: Tensor,  # [R, ...]
    rows: Tensor | None,  # [R'] int64
) -> Tensor:
    return values if rows is None else values[rows]


def _window(work: Work) -> Window:
    sequence = work.sequence
    return Window(sequence.sampling, sequence.kv.token_ids, sequence.opened.num_prompt_tokens, work.drafted)


def _coupled_picks(
    p: Tensor,  # [R, vocab_size]
    works: Sequence[Work],
    kernels: SamplingKernels | None,
) -> Tensor:
    """[R] the target's own pick at each row."""
    seeds: list[int] = []
    choices: list[int] = []
    positions: list[int] = []
    for work in works:
        opened, length = work.sequence.opened, work.sequence.committed_length
        count = work.chunk.num_logits
        seeds += [opened.seed] * count
        choices += [opened.choice_index] * count
        positions += range(length, length + count)
    return coupled_tokens(p, seeds, choices, positions, kernels)


def _drafts(works: Sequence[Work], device: torch.device) -> Drafts:
    """Pads the windows' drafts and their q to one batch; one-hot where q is absent."""
    batch, longest = len(works), max(len(work.drafted) for work in works)
    widest = max((int(work.q.sizes.max(initial=1)) for work in works if work.q), default=1)
    token_ids = np.zeros((batch, longest), dtype=np.int64)
    q_token_ids = np.zeros((batch, longest, widest), dtype=np.int64)
    q_probs = np.zeros((batch, longest, widest), dtype=np.float32)
    for b, work in enumerate(works):
        count = len(work.drafted)
        token_ids[b, :count] = work.drafted
        if work.q is None:
            q_token_ids[b, :count, 0] = work.drafted
            q_probs[b, :count, 0] = 1.0
        else:
            sizes = work.q.sizes[:count]
            inside = np.arange(widest) < sizes[:, None]
            total = int(sizes.sum())
            q_token_ids[b, :count][inside] = work.q.token_ids[:total]
            q_probs[b, :count][inside] = work.q.probs[:total]
    lengths = torch.tensor([len(work.drafted) for work in works])
    arrays = (torch.from_numpy(token_ids), lengths, torch.from_numpy(q_token_ids), torch.from_numpy(q_probs))
    return Drafts(*(array.to(device) for array in arrays))


def _outcomes(verified: Verified, works: Sequence[Work]) -> list[Outcome]:
    columns = (verified.accepted, verified.next_token, verified.tested, verified.passed)
    outcomes = []
    for work, accepted, token, tested, passed in zip(works, *(c.tolist() for c in columns), strict=True):
        count = len(work.drafted)
        token_ids = [*work.drafted[:accepted], token]
        outcomes.append(Outcome(token_ids, accepted, tuple(tested[:count]), tuple(passed[:count])))
    return outcomes
