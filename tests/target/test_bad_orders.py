"""What can't be served ends its own sequence, with a reason, and touches nobody else."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from specdecode.errors import Reason, SpecdecodeError
from specdecode.lm.model import adopt_model
from specdecode.lm.pool import BlockPool
from specdecode.lm.runner import Chunk, PagedLM
from specdecode.lm.sequence import KVSequence
from specdecode.types import Lease, Method, SparseDistributions, Verify
from target_service.engine import Engine
from target_service.scheduler import SchedulerLimits
from target_service.sequence import SequenceKey, TargetSequence, Work
from target_service.verify import Verifier
from tests.lm.tiny import MAX_LENGTH, VOCAB_SIZE, plain_model
from tests.target.driver import Client, make_engine, one_hot_q, opening
from tests.target.texts import GREEDY_TEXT, OTHER_PROMPT, OTHER_TEXT, PROMPT, WRONG, prompt_lease


def field_of(error: SpecdecodeError | None) -> str | None:
    assert error is not None
    return error.violations[0].field if error.violations else None


def bad_q(sizes: list[int], ids: list[int], probs: list[float]) -> SparseDistributions:
    return SparseDistributions(
        np.array(sizes, np.int32), np.array(ids, np.int32), np.array(probs, np.float32)
    )


BAD_OPENS: dict[str, tuple[dict[str, Any], Reason, str | None]] = {
    "no tokens": ({"token_ids": (), "num_prompt_tokens": 0}, Reason.INVALID_ARGUMENT, "num_prompt_tokens"),
    "no prompt": ({"num_prompt_tokens": 0}, Reason.INVALID_ARGUMENT, "num_prompt_tokens"),
    "prompt longer than tokens": ({"num_prompt_tokens": 99}, Reason.INVALID_ARGUMENT, "num_prompt_tokens"),
    "id above the vocabulary": ({"token_ids": (1, VOCAB_SIZE)}, Reason.INVALID_ARGUMENT, "token_ids"),
    "negative id": ({"token_ids": (1, -1)}, Reason.INVALID_ARGUMENT, "token_ids"),
    "nothing to emit": ({"max_tokens": 0}, Reason.INVALID_ARGUMENT, "sampling.max_tokens"),
    "all emitted": (
        {"token_ids": (1, 2, 3, 4), "max_tokens": 2},
        Reason.INVALID_ARGUMENT,
        "sampling.max_tokens",
    ),
    "past the context": ({"max_tokens": MAX_LENGTH}, Reason.INVALID_ARGUMENT, "sampling.max_tokens"),
    "past the pool": ({"max_tokens": 300}, Reason.KV_TOO_SMALL, None),
    "bias of an unknown id": (
        {"logit_bias": ((VOCAB_SIZE, 1.0),)},
        Reason.INVALID_ARGUMENT,
        "sampling.logit_bias",
    ),
}
BAD_ORDERS: dict[str, tuple[Verify | Lease, Reason, str | None]] = {
    "unknown sequence to verify": (Verify(9, 2, ()), Reason.SEQUENCE_UNKNOWN, None),
    "unknown sequence to lease": (Lease(9, 2, 3), Reason.SEQUENCE_UNKNOWN, None),
    "lease from the future": (Lease(1, 3, 3), Reason.INVALID_ARGUMENT, "leases.committed_length"),
    "too many drafts": (Verify(1, 2, (1,) * 33), Reason.INVALID_ARGUMENT, "verifies.drafted"),
    "draft above the vocabulary": (Verify(1, 2, (VOCAB_SIZE,)), Reason.INVALID_ARGUMENT, "verifies.drafted"),
    "negative draft": (Verify(1, 2, (-1,)), Reason.INVALID_ARGUMENT, "verifies.drafted"),
    "q for fewer drafts": (Verify(1, 2, (1, 2), one_hot_q([1])), Reason.INVALID_ARGUMENT, "verifies.q"),
    "q for more drafts": (Verify(1, 2, (1,), one_hot_q([1, 2])), Reason.INVALID_ARGUMENT, "verifies.q"),
    "q without support": (Verify(1, 2, (1,), bad_q([0], [], [])), Reason.INVALID_ARGUMENT, "verifies.q"),
    "q with fewer ids": (
        Verify(1, 2, (1,), bad_q([2], [1], [0.5, 0.5])),
        Reason.INVALID_ARGUMENT,
        "verifies.q",
    ),
    "q with fewer probs": (
        Verify(1, 2, (1,), bad_q([2], [1, 2], [1])),
        Reason.INVALID_ARGUMENT,
        "verifies.q",
    ),
    "q of an unknown id": (
        Verify(1, 2, (1,), bad_q([2], [1, VOCAB_SIZE], [0.5, 0.5])),
        Reason.INVALID_ARGUMENT,
        "verifies.q",
    ),
    "q of a negative id": (Verify(1, 2, (1,), bad_q([1], [-1], [1])), Reason.INVALID_ARGUMENT, "verifies.q"),
    "q with NaN": (Verify(1, 2, (1,), bad_q([1], [1], [np.nan])), Reason.INVALID_ARGUMENT, "verifies.q"),
    "q with infinity": (Verify(1, 2, (1,), bad_q([1], [1], [np.inf])), Reason.INVALID_ARGUMENT, "verifies.q"),
    "q below zero": (
        Verify(1, 2, (1,), bad_q([2], [1, 2], [1.5, -0.5])),
        Reason.INVALID_ARGUMENT,
        "verifies.q",
    ),
    "q without mass": (
        Verify(1, 2, (1, 2), bad_q([1, 1], [1, 2], [1, 0])),
        Reason.INVALID_ARGUMENT,
        "verifies.q",
    ),
}


@pytest.mark.parametrize("case", BAD_OPENS)
def test_a_bad_open_is_answered_at_once_and_touches_nobody(case: str) -> None:
    changes, reason, field = BAD_OPENS[case]
    client = Client(make_engine(num_blocks=16))
    client.send(opening(0, PROMPT, max_tokens=40), prompt_lease(40))
    client.step()
    opened = opening(1, (1, 2), max_tokens=4)
    sampling = {name: changes[name] for name in ("max_tokens", "logit_bias") if name in changes}
    rest = {name: value for name, value in changes.items() if name not in sampling}
    client.send(replace(opened, sampling=replace(opened.sampling, **sampling), **rest))
    results = client.step()
    error = results[1].error
    assert error is not None
    assert (error.reason, field_of(error)) == (reason, field)
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT


@pytest.mark.parametrize("case", BAD_ORDERS)
def test_a_bad_order_ends_its_own_sequence_only(case: str) -> None:
    order, reason, field = BAD_ORDERS[case]
    client = Client(make_engine())
    client.send(
        opening(0, PROMPT, max_tokens=40), opening(1, (1, 2), method=Method.REJECTION), prompt_lease(40)
    )
    client.step()
    client.send(order)
    error = client.step()[order.sequence].error
    assert error is not None
    assert (error.reason, field_of(error)) == (reason, field)
    assert len(client.engine.sequences) == (2 if order.sequence == 9 else 1)
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT


def test_a_second_open_of_the_same_number_ends_that_sequence() -> None:
    """An error says that the replica has forgotten the sequence: nothing of it may stay."""
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=40), opening(1, PROMPT, max_tokens=40), prompt_lease(40, 1))
    client.step()
    client.send(opening(0, [1, 2, 3]))
    error = client.step()[0].error
    assert error is not None
    assert error.reason is Reason.SEQUENCE_EXISTS
    assert client.open == [1]
    client.settle()
    assert client.tokens(1) == GREEDY_TEXT
    assert client.engine.lm.pool.num_free == 64


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_running=1, max_waiting=2)))
    client.send(opening(0, PROMPT, max_tokens=5))
    client.step()
    client.send(*(opening(sequence, PROMPT, max_tokens=5) for sequence in (1, 2, 3)))
    error = client.step()[3].error
    assert error is not None
    assert error.reason is Reason.QUEUE_FULL
    assert error.retry_after is not None
    client.send(client.lease(0, 5))
    client.run(lambda sequence: client.lease(sequence, 5))
    assert [client.tokens(sequence) for sequence in (0, 1, 2)] == [GREEDY_TEXT[:5]] * 3


def test_closing_what_is_not_open_is_fine() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    client.send(7)
    assert client.step() == {}
    client.send(0)
    client.send(0)
    assert client.engine.lm.pool.num_free == 64


def broken_engine() -> Engine:
    """One whose embedding of WRONG is NaN."""
    module = deepcopy(plain_model("llama"))
    model = adopt_model(module, "llama")
    module.get_input_embeddings().weight[WRONG] = torch.nan
    return Engine(PagedLM(model, num_blocks=64))


@pytest.mark.parametrize("where", ["prompt", "last token", "accepted draft"])
def test_nan_ends_its_own_sequence_only(where: str) -> None:
    prompts = {"prompt": [WRONG, *PROMPT[1:]], "last token": [*PROMPT[:-1], WRONG], "accepted draft": PROMPT}
    bad_prompt = prompts[where]
    client = Client(broken_engine())
    bias = ((WRONG, 1e6),) if where == "accepted draft" else ()
    client.send(
        opening(0, bad_prompt, max_tokens=20, logit_bias=bias),
        *(opening(i, p, max_tokens=20) for i, p in ((1, PROMPT), (2, OTHER_PROMPT))),
    )
    drafted = (WRONG, 1) if where == "accepted draft" else ()
    client.send(Verify(0, len(bad_prompt), drafted), Lease(1, len(PROMPT), 20), Lease(2, 9, 20))
    client.settle()
    error = client.last(0).error
    assert error is not None
    assert error.reason is Reason.NUMERICAL_ERROR
    assert client.tokens(0) == []
    assert client.tokens(1) == GREEDY_TEXT[:20]
    assert client.tokens(2) == OTHER_TEXT[:20]
    assert client.engine.lm.pool.num_free == 64


@pytest.mark.parametrize("drafted", [(WRONG,), (1, WRONG), (GREEDY_TEXT[0], WRONG, 1), (WRONG, WRONG)])
def test_a_rejected_draft_that_the_model_has_no_answer_to_changes_nothing(drafted: tuple[int, ...]) -> None:
    client = Client(broken_engine())
    client.send(opening(0, PROMPT, max_tokens=20, logprobs=1))
    client.run(lambda sequence: client.verify(sequence, *drafted))
    assert client.last(0).error is None
    assert client.tokens(0) == GREEDY_TEXT[:20]


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_what_comes_before_a_row_without_answer_has_the_targets_distribution(method: Method) -> None:
    """Two drafts from q in each of many windows; after one value of the first the target is NaN."""
    num_windows, vocab_size, sick = 6000, 5, 2
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(vocab_size, generator=generator).softmax(0) for _ in range(2))
    first, second = torch.multinomial(q, 2 * num_windows, replacement=True, generator=generator).view(2, -1)
    pool = BlockPool(1, 16)
    works = []
    for number, drafted in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        opened = opening(number, PROMPT, temperature=1.0, max_tokens=20, method=method)
        kv = KVSequence(pool, PROMPT)
        sent = SparseDistributions(
            np.full(2, vocab_size, np.int32),
            np.tile(np.arange(vocab_size, dtype=np.int32), 2),
            np.tile(q.numpy(), 2),
        )
        verify = Verify(number, len(PROMPT), drafted, sent)
        sequence = TargetSequence(SequenceKey(1, number), opened, kv, verify)
        works.append(Work(sequence, Chunk(kv, [PROMPT[-1], *drafted], 3), drafted, verify))
    logits = p.log().expand(num_windows, 3, vocab_size).clone()
    logits[first == sick, 1:] = torch.nan
    outcomes = Verifier(torch.Generator().manual_seed(2)).verify(logits.flatten(0, 1), works)
    # Who fails had accepted the first draft.
    emitted = [
        first[i].item() if outcome.error else outcome.token_ids[0] for i, outcome in enumerate(outcomes)
    ]
    assert any(outcome.error for outcome in outcomes)
    counts = np.bincount(emitted, minlength=vocab_size)
    assert (
        scipy.stats.chisquare(counts, num_windows * p.double().numpy() / p.double().sum().item()).pvalue
        > 1e-4
    )


def test_a_prefix_with_nan_is_not_found_by_the_next_sequence() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    block = client.state(0).kv.block_table[0]
    client.engine.lm.kv.values[0][block] = torch.nan
    client.send(client.verify(0))
    error = client.step()[0].error
    assert error is not None
    assert error.reason is Reason.NUMERICAL_ERROR
    client.send(opening(1, PROMPT, max_tokens=40))
    client.run(lambda sequence: client.lease(sequence, 40))
    assert client.tokens(1) == GREEDY_TEXT
