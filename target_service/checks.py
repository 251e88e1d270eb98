"""What a router's orders must satisfy: whatever would fail in the middle of a step is refused before it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specdecode.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    Reason,
    ResourceExhaustedError,
)
from specdecode.lm import draft_vocabulary
from specdecode.lm.model import LoadedModel
from specdecode.lm.runner import PagedLM
from specdecode.types import MAX_DRAFT_TOKENS, OpenSequence, SparseDistributions, Verify


def check_target(model: LoadedModel) -> None:
    """Refuses a model that could never emit some of its tokens.

    Raises:
        FailedPreconditionError: it has a draft vocabulary.
    """
    if model.draft_vocabulary is not None:
        raise FailedPreconditionError(
            f"{model.name} can't be a target: its {draft_vocabulary.FILE_NAME} leaves "
            f"{len(model.draft_vocabulary)} of {model.vocab_size} ids with a probability, so its texts would "
            "not be the model's own; serve it as a draft, or remove the file"
        )


def check_open(opened: OpenSequence, lm: PagedLM) -> None:
    """Refuses what this target can never serve.

    Raises:
        InvalidArgumentError: lengths that contradict one another or exceed the context, or unknown ids.
        ResourceExhaustedError: the pool is too small for it, however long it waits.
    """
    sampling, length = opened.sampling, len(opened.token_ids)
    prompt_length, max_tokens = opened.num_prompt_tokens, opened.sampling.max_tokens
    if not 1 <= prompt_length <= length:
        raise InvalidArgumentError.of("num_prompt_tokens", f"{prompt_length} is outside 1 to {length}")
    if not length - prompt_length < max_tokens:
        raise InvalidArgumentError.of("sampling.max_tokens", f"{max_tokens} are emitted already")
    if prompt_length + max_tokens > lm.model.max_length:
        raise InvalidArgumentError.of(
            "sampling.max_tokens",
            f"{max_tokens} and {prompt_length} prompt tokens exceed the context of {lm.model.max_length}",
        )
    if prompt_length + max_tokens > lm.max_length:
        raise ResourceExhaustedError(
            f"{prompt_length} prompt tokens and {max_tokens} more never fit into the KV pool of "
            f"{lm.max_length} tokens",
            reason=Reason.KV_TOO_SMALL,
        )
    _check_ids("token_ids", opened.token_ids, lm.model.vocab_size)
    _check_ids("sampling.logit_bias", (token for token, _ in sampling.logit_bias), lm.model.vocab_size)


def check_verify(verify: Verify, vocab_size: int) -> None:
    """Refuses a round that can't be verified.

    Raises:
        InvalidArgumentError: too many drafts, unknown ids, or a q that does not fit them.
    """
    if len(verify.drafted) > MAX_DRAFT_TOKENS:
        raise InvalidArgumentError.of(
            "verifies.drafted", f"{len(verify.drafted)} drafts, at most {MAX_DRAFT_TOKENS}"
        )
    _check_ids("verifies.drafted", verify.drafted, vocab_size)
    if verify.q is not None:
        _check_q(verify.q, len(verify.drafted), vocab_size)


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    if not all(0 <= token < vocab_size for token in token_ids):
        raise InvalidArgumentError.of(field, f"ids must be below {vocab_size}")


def _check_q(q: SparseDistributions, num_drafted: int, vocab_size: int) -> None:
    if len(q.sizes) != num_drafted:
        raise InvalidArgumentError.of("verifies.q", f"{len(q.sizes)} positions for {num_drafted} drafts")
    if not num_drafted:
        return
    total = int(q.sizes.sum())
    if q.sizes.min() < 1 or not len(q.token_ids) == len(q.probs) == total:
        raise InvalidArgumentError.of(
            "verifies.q",
            f"{len(q.token_ids)} ids and {len(q.probs)} probabilities; supports (1 or more) need {total}",
        )
    if q.token_ids.min() < 0 or q.token_ids.max() >= vocab_size:
        raise InvalidArgumentError.of("verifies.q", f"ids must be below {vocab_size}")
    masses = np.add.reduceat(q.probs.astype(np.float64), np.cumsum(q.sizes) - q.sizes)
    if not (q.probs.min() >= 0 and np.isfinite(masses).all() and masses.min() > 0):
        raise InvalidArgumentError.of(
            "verifies.q", "probabilities must be finite, not negative and not all 0"
        )
