"""The model drafter against transformers' own forward and generate, in float32."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from draft_service.drafting import SequenceKey
from draft_service.drawing import draw_sampled
from draft_service.model import DraftLimits, ModelDrafter, ModelSequence
from specdecode import sampling
from specdecode.errors import InternalError, InvalidArgumentError, NumericalError
from specdecode.lm.model import adopt_model
from specdecode.lm.runner import Chunk
from specdecode.types import Draft, Method, Propose, SamplingParams, SparseDistributions
from tests.draft.tiny import (
    VOCAB_SIZE,
    check_integrity,
    greedy_continuation,
    new_drafter,
    open_draft,
    paged_model,
    plain_logits,
    plain_model,
    reduced_model,
    run,
)

TRANSFORMED = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((3, 2.0), (8, -1.0)),
    banned_token_ids=(5,),
    temperature=1.2,
    top_p=0.9,
    min_p=0.01,
)


def key(number: int) -> SequenceKey:
    return SequenceKey(0, number)


def tokens_of(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def propose(
    drafter: ModelDrafter, sequence: ModelSequence, num_tokens: int, new: Sequence[int] = ()
) -> Draft:
    """The draft of one sequence after committing `new`."""
    number = sequence.key.sequence
    sequence.propose(Propose(number, sequence.committed_length, tuple(new), num_tokens))
    (answer,) = run(drafter)
    return answer.draft


def split(q: SparseDistributions) -> list[dict[int, float]]:
    """{token: probability} at each position."""
    bounds = np.cumsum(q.sizes)[:-1]
    ids, probs = np.split(q.token_ids, bounds), np.split(q.probs, bounds)
    return [dict(zip(i.tolist(), p.tolist(), strict=True)) for i, p in zip(ids, probs, strict=True)]


# Histories: what a round may do to one sequence


@dataclass(frozen=True)
class Round:
    """What a round does to one sequence."""

    gamma: int
    accepted: int
    """Drafts of the round before that are committed, if there are as many."""
    emitted: tuple[int, ...]
    """Committed after them; more than one when others than this drafter went on with the text."""
    taken_back: int
    """Committed tokens replaced by `emitted`, in which case no draft is accepted."""

    def continues(self, sequence: ModelSequence, drafted: tuple[int, ...]) -> Propose:
        """The order that tells the drafter so, after it drafted `drafted`."""
        number, known = sequence.key.sequence, sequence.committed_length
        if self.taken_back:
            return Propose(number, max(known - self.taken_back, 1), self.emitted, self.gamma)
        return Propose(number, known, drafted[: self.accepted] + self.emitted, self.gamma)


rounds = st.builds(
    Round,
    gamma=st.integers(0, 5),
    accepted=st.integers(0, 5),
    emitted=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3).map(tuple),
    taken_back=st.sampled_from([0, 0, 0, 0, 1, 3, 9]),
)
histories = st.lists(st.tuples(rounds, rounds, rounds), min_size=1, max_size=5)


def assert_kv_is_a_fresh_prefill(drafter: ModelDrafter, sequence: ModelSequence) -> None:
    tokens = (sequence.kv.token_ids + sequence.drafted)[: sequence.kv.kv_len]
    if not tokens:
        return
    with torch.inference_mode():
        cache = plain_model()(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
    for layer, fresh in enumerate(cache.layers):
        for paged, plain in ((drafter.lm.kv.keys, fresh.keys), (drafter.lm.kv.values, fresh.values)):
            rows = paged[layer][sequence.kv.block_table].flatten(0, 1)[: len(tokens)]
            torch.testing.assert_close(rows, plain[0].transpose(0, 1), atol=1e-5, rtol=0)


@given(histories)
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("num_blocks", [200, 25])
def test_drafts_and_kv_are_those_of_a_fresh_start_after_any_history(
    num_blocks: int, history: list[tuple[Round, Round, Round]]
) -> None:
    # 25 blocks of 4 hold two of the three sequences at most: KV is dropped and computed again all the time.
    drafter = new_drafter(num_blocks=num_blocks, max_length=80, limits=DraftLimits(prefill_chunk=40))
    committed = [tokens_of(number, length) for number, length in enumerate((1, 17, 64))]
    sequences = [drafter.open(key(number), open_draft(number, ids)) for number, ids in enumerate(committed)]
    drafts: list[tuple[int, ...]] = [()] * 3
    for together in history:
        for number, (turn, sequence) in enumerate(zip(together, sequences, strict=True)):
            order = turn.continues(sequence, drafts[number])
            committed[number][order.from_length :] = order.token_ids
            sequence.propose(order)
        answers = {answer.key.sequence: answer.draft for answer in run(drafter)}
        for number, (turn, sequence) in enumerate(zip(together, sequences, strict=True)):
            drafts[number] = answers[number].token_ids
            room = max(80 - len(committed[number]), 0)
            assert drafts[number] == greedy_continuation(committed[number], min(turn.gamma, room))
            assert sequence.kv.token_ids == committed[number]
            assert_kv_is_a_fresh_prefill(drafter, sequence)
    for sequence in sequences:
        sequence.close()
    assert drafter.lm.pool.num_free == num_blocks
    check_integrity(drafter)


def test_a_rejection_costs_no_turn_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of γ drafts is γ forwards of one token, whatever of the round before was accepted."""
    drafter = new_drafter()
    sequence = drafter.open(key(1), open_draft(1, tokens_of(1, 30)))
    draft = propose(drafter, sequence, 5)
    forward, fed = drafter.lm.forward_columns, list[int]()

    def counted(chunks: Sequence[Chunk]) -> torch.Tensor:
        fed.append(sum(len(chunk.token_ids) for chunk in chunks))
        return forward(chunks)

    monkeypatch.setattr(drafter.lm, "forward_columns", counted)
    for accepted in (5, 0, 2, 4):
        fed.clear()
        recovered = (draft.token_ids[accepted] + 1) % VOCAB_SIZE if accepted < 5 else 7
        new = (*draft.token_ids[:accepted], recovered)
        sequence.propose(Propose(1, sequence.committed_length, new, 5))
        assert sequence.num_missing == (2 if accepted == 5 else 1)
        (answer,) = run(drafter)
        draft = answer.draft
        assert len(draft.token_ids) == 5
        assert fed == [2 if accepted == 5 else 1, 1, 1, 1, 1]


def test_sequences_with_different_depths_share_the_turns() -> None:
    drafter = new_drafter()
    for number, gamma in enumerate((3, 1, 5, 0)):
        sequence = drafter.open(key(number), open_draft(number, tokens_of(number, 9)))
        sequence.propose(Propose(number, 9, (), gamma))
    answered = [[answer.key.sequence for answer in drafter.advance()] for _ in range(5)]
    assert answered == [[3, 1], [], [0], [], [2]]


# q


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
@pytest.mark.parametrize("top_k", [1, 4, 64])
def test_q_is_the_transformed_distribution_with_drafts_in_its_history(method: Method, top_k: int) -> None:
    drafter = new_drafter(limits=DraftLimits(top_k=top_k))
    prompt = tokens_of(1, 20)
    sequence = drafter.open(key(1), open_draft(1, prompt, method, TRANSFORMED))
    draft = propose(drafter, sequence, 6)
    assert draft.q is not None
    for position, (token, q) in enumerate(zip(draft.token_ids, split(draft.q), strict=True)):
        history = [*prompt, *draft.token_ids[:position]]
        window = sampling.Window(TRANSFORMED, history, len(prompt))
        p = sampling.probabilities(plain_logits(history)[-1:].double(), [window])
        ids, probs = sampling.restrict_top_k(p, top_k)
        expected = {i: x for i, x in zip(ids[0].tolist(), probs[0].tolist(), strict=True) if x > 0}
        assert q == pytest.approx(expected, abs=1e-5)
        assert abs(sum(q.values()) - 1) < 1e-6
        assert token in q
        assert 5 not in q


def test_drafts_are_drawn_from_the_q_that_is_sent() -> None:
    """χ² of the first drafts, and of the second ones given the first, over 5,000 drafts with a fixed seed."""
    drafter = new_drafter(num_blocks=500, limits=DraftLimits(top_k=6))
    order = open_draft(1, tokens_of(3, 12), Method.REJECTION, SamplingParams(temperature=1.5))
    sequences = [drafter.open(key(number), replace(order, sequence=number)) for number in range(100)]
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    sent: dict[tuple[int, ...], dict[int, float]] = {}
    for _ in range(50):
        for sequence in sequences:
            sequence.propose(Propose(sequence.key.sequence, 12, (), 2))
        for answer in run(drafter):
            draft = answer.draft
            assert draft.q is not None
            for position, q in enumerate(split(draft.q)):
                counts[draft.token_ids[:position]][draft.token_ids[position]] += 1
                sent[draft.token_ids[:position]] = q
    assert len(counts) == 7
    for before, seen in counts.items():
        assert seen.keys() <= sent[before].keys()
        expected = np.array(list(sent[before].values()))
        observed = np.array([seen[token] for token in sent[before]])
        assert (expected * observed.sum()).min() >= 5
        assert stats.chisquare(observed, expected / expected.sum() * observed.sum()).pvalue > 1e-4


def test_draws_follow_q_for_every_u() -> None:
    """u on a fine grid: each token gets a share of the grid that is its probability, within one cell."""
    logits = plain_logits(tokens_of(4, 8))[-1:]
    window = sampling.Window(TRANSFORMED, tokens_of(4, 8), 8)
    cells = 5_000
    u = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    draws = draw_sampled(logits.expand(cells, -1), [window] * cells, u, top_k=8)
    tokens = np.bincount([draw.token for draw in draws if draw is not None], minlength=VOCAB_SIZE)
    assert draws[0] is not None
    assert draws[0].q is not None
    q = np.zeros(VOCAB_SIZE)
    q[draws[0].q.token_ids] = draws[0].q.probs
    assert np.abs(tokens / cells - q).max() <= 1.01 / cells


@pytest.mark.parametrize("method", [Method.GREEDY, Method.COUPLED])
def test_greedy_and_coupled_drafts_have_no_q(method: Method) -> None:
    drafter = new_drafter()
    params = SamplingParams(temperature=0.0 if method is Method.GREEDY else 1.0)
    sequence = drafter.open(key(1), open_draft(1, tokens_of(1, 5), method, params))
    draft = propose(drafter, sequence, 4)
    assert len(draft.token_ids) == 4
    assert draft.q is None


def test_greedy_drafts_follow_the_penalised_logits() -> None:
    drafter = new_drafter()
    params = replace(TRANSFORMED, temperature=0.0)
    prompt = tokens_of(1, 20)
    draft = propose(drafter, drafter.open(key(1), open_draft(1, prompt, Method.GREEDY, params)), 6)
    history = list(prompt)
    for token in draft.token_ids:
        window = sampling.Window(params, history, len(prompt))
        assert token == int(sampling.greedy_tokens(plain_logits(history)[-1:], [window]))
        history.append(token)
    assert draft.token_ids != greedy_continuation(prompt, 6)


@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1])
def test_coupled_drafts_are_the_picks_of_a_target_with_the_same_model(seed: int) -> None:
    drafter = new_drafter()
    params = replace(TRANSFORMED, top_k=40)
    prompt = tokens_of(2, 20)
    sequences = [
        drafter.open(key(choice), open_draft(choice, prompt, Method.COUPLED, params, seed, choice))
        for choice in range(3)
    ]
    for sequence in sequences:
        sequence.propose(Propose(sequence.key.sequence, len(prompt), (), 8))
    drafts = {answer.key.sequence: answer.draft.token_ids for answer in run(drafter)}
    assert len(set(drafts.values())) == 3
    for choice, token_ids in drafts.items():
        history = list(prompt)
        for token in token_ids:
            p = sampling.probabilities(
                plain_logits(history)[-1:], [sampling.Window(params, history, len(prompt))]
            )
            assert token == int(sampling.coupled_tokens(p, [seed], [choice], [len(history)]))
            history.append(token)


def test_methods_mix_in_one_turn() -> None:
    drafter = new_drafter()
    for number, method in enumerate([Method.REJECTION, Method.GREEDY, Method.COUPLED, Method.GREEDY]):
        params = SamplingParams(temperature=0.0 if method is Method.GREEDY else 1.0)
        order = open_draft(number, tokens_of(number, 9), method, params)
        drafter.open(key(number), order).propose(Propose(number, 9, (), 3))
    drafts = {answer.key.sequence: answer.draft for answer in run(drafter)}
    assert [drafts[number].q is not None for number in range(4)] == [True, False, False, False]
    for number in (1, 3):
        assert drafts[number].token_ids == greedy_continuation(tokens_of(number, 9), 3)


# A reduced vocabulary

KEPT = tuple(range(1, VOCAB_SIZE, 3))


@pytest.mark.parametrize("method", Method)
def test_only_ids_of_the_draft_vocabulary_are_drafted_and_have_probability(method: Method) -> None:
    drafter = new_drafter(model=reduced_model(KEPT))
    params = SamplingParams(temperature=0.0 if method is Method.GREEDY else 2.0)
    for number in range(12):
        order = open_draft(number, tokens_of(number, 9), method, params, seed=5)
        drafter.open(key(number), order).propose(Propose(number, 9, (), 6))
    drafts = [answer.draft for answer in run(drafter)]
    assert len(drafts) == 12
    for draft in drafts:
        assert len(draft.token_ids) == 6
        assert set(draft.token_ids) <= set(KEPT)
        if draft.q is not None:
            assert set(draft.q.token_ids.tolist()) <= set(KEPT)
            assert all(sum(q.values()) == pytest.approx(1.0, abs=1e-5) for q in split(draft.q))


@pytest.mark.parametrize("method", Method)
def test_where_no_permitted_id_is_in_the_draft_vocabulary_nothing_is_drafted(method: Method) -> None:
    drafter = new_drafter(model=reduced_model(KEPT))
    temperature = 0.0 if method is Method.GREEDY else 1.0
    outside = SamplingParams(temperature=temperature, allowed_token_ids=(0, 2, 3))
    partly = SamplingParams(temperature=temperature, top_k=5, allowed_token_ids=(0, 2, 4, 7))
    for number, params in enumerate([outside, partly]):
        sequence = drafter.open(key(number), open_draft(number, tokens_of(1, 9), method, params))
        sequence.propose(Propose(number, 9, (), 4))
    drafts = {answer.key.sequence: answer.draft for answer in run(drafter)}
    assert isinstance(drafts[0].error, NumericalError)
    assert "no token that it may draft is permitted" in drafts[0].error.message
    assert len(drafts[1].token_ids) == 4
    assert set(drafts[1].token_ids) <= {4, 7}


# Ends and limits


def test_nothing_is_drafted_after_a_stop_id() -> None:
    drafter = new_drafter()
    prompt = tokens_of(1, 10)
    continuation = greedy_continuation(prompt, 8)
    stop = continuation[2]
    params = SamplingParams(temperature=0.0, stop_token_ids=(stop,))
    draft = propose(drafter, drafter.open(key(1), open_draft(1, prompt, sampling=params)), 8)
    assert draft.token_ids == continuation[: continuation.index(stop) + 1]


@pytest.mark.parametrize(("committed", "num_drafted"), [(19, 5), (20, 4), (23, 1), (24, 0), (25, 0), (40, 0)])
def test_nothing_is_drafted_past_the_context_of_the_draft_model(committed: int, num_drafted: int) -> None:
    drafter = new_drafter(max_length=24)
    prompt = tokens_of(1, committed)
    sequence = drafter.open(key(1), open_draft(1, prompt))
    draft = propose(drafter, sequence, 5)
    assert draft.error is None
    assert draft.token_ids == greedy_continuation(prompt, num_drafted)
    if committed >= 24:
        assert drafter.lm.pool.num_free == drafter.lm.pool.num_blocks


def test_kv_is_given_back_once_the_context_is_full() -> None:
    drafter = new_drafter(max_length=24)
    sequence = drafter.open(key(1), open_draft(1, tokens_of(1, 20)))
    propose(drafter, sequence, 2)
    assert drafter.lm.pool.num_free < drafter.lm.pool.num_blocks
    propose(drafter, sequence, 2, new=tokens_of(2, 4))
    assert drafter.lm.pool.num_free == drafter.lm.pool.num_blocks


def test_no_draft_is_longer_than_the_service_allows() -> None:
    drafter = new_drafter(limits=DraftLimits(max_draft_tokens=3))
    draft = propose(drafter, drafter.open(key(1), open_draft(1, tokens_of(1, 9))), 8)
    assert len(draft.token_ids) == 3


def test_a_full_pool_drops_the_least_recently_used_and_fails_nobody() -> None:
    # Each sequence needs 8 of 20 blocks.
    drafter = new_drafter(num_blocks=20, max_length=64)
    sequences = [drafter.open(key(n), open_draft(n, tokens_of(n, 27))) for n in range(6)]
    for sequence in sequences:
        draft = propose(drafter, sequence, 3)
        assert draft.token_ids == greedy_continuation(sequence.kv.token_ids, 3)
    assert [bool(sequence.kv.block_table) for sequence in sequences] == [False] * 4 + [True] * 2
    for sequence in sequences:
        sequence.propose(Propose(sequence.key.sequence, 27, (7,), 3))
    drafts = {answer.key.sequence: answer.draft for answer in run(drafter)}
    for sequence in sequences:
        draft = drafts[sequence.key.sequence]
        assert draft.token_ids == greedy_continuation(sequence.kv.token_ids, 3)


def test_working_ahead_takes_no_room_from_others() -> None:
    drafter = new_drafter(num_blocks=10, max_length=40)
    first = drafter.open(key(1), open_draft(1, tokens_of(1, 24)))
    propose(drafter, first, 2)
    held = list(first.kv.block_table)
    second = drafter.open(key(2), open_draft(2, tokens_of(2, 30)))
    assert run(drafter) == []
    assert first.kv.block_table == held
    assert propose(drafter, second, 2).token_ids == greedy_continuation(tokens_of(2, 30), 2)


def test_an_opened_sequence_is_computed_ahead_of_its_first_propose() -> None:
    drafter = new_drafter()
    sequence = drafter.open(key(1), open_draft(1, tokens_of(1, 50)))
    assert run(drafter) == []
    assert sequence.kv.kv_len == 49


def test_a_long_prefill_does_not_hold_up_other_drafts() -> None:
    drafter = new_drafter(limits=DraftLimits(prefill_chunk=64))
    short = drafter.open(key(1), open_draft(1, tokens_of(1, 5)))
    run(drafter)
    long = drafter.open(key(2), open_draft(2, tokens_of(2, 200)))
    long.propose(Propose(2, 200, (), 2))
    short.propose(Propose(1, 5, (), 4))
    computed = []
    for _ in range(4):
        answers = drafter.advance()
        computed.append(long.kv.kv_len)
    assert [answer.key.sequence for answer in answers] == [1]
    assert computed == [16, 32, 48, 64]
    (answer,) = run(drafter)
    assert answer.draft.token_ids == greedy_continuation(tokens_of(2, 200), 2)


def test_a_newer_propose_replaces_one_that_waits() -> None:
    drafter = new_drafter()
    sequence = drafter.open(key(1), open_draft(1, tokens_of(1, 9)))
    sequence.propose(Propose(1, 9, (), 5))
    drafter.advance()
    drafter.advance()
    draft = propose(drafter, sequence, 2, new=[3, 4])
    assert draft.committed_length == 11
    assert draft.token_ids == greedy_continuation([*tokens_of(1, 9), 3, 4], 2)


# Bad input and failures


def test_ids_outside_the_vocabulary_are_refused() -> None:
    drafter = new_drafter()
    with pytest.raises(InvalidArgumentError, match=f"token_ids: id {VOCAB_SIZE} is refused"):
        drafter.open(key(1), open_draft(1, [0, VOCAB_SIZE]))
    biased = SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))
    with pytest.raises(InvalidArgumentError, match=r"sampling\.logit_bias"):
        drafter.open(key(1), open_draft(1, [0], Method.REJECTION, biased))
    sequence = drafter.open(key(1), open_draft(1, [0]))
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        sequence.propose(Propose(1, 1, (VOCAB_SIZE,), 2))
    assert sequence.committed_length == 1


@pytest.mark.parametrize("method", Method)
def test_a_request_that_permits_nothing_fails_alone(method: Method) -> None:
    drafter = new_drafter()
    temperature = 0.0 if method is Method.GREEDY else 1.0
    nothing = SamplingParams(temperature=temperature, banned_token_ids=tuple(range(VOCAB_SIZE)))
    anything = SamplingParams(temperature=temperature)
    for number, params in enumerate([anything, nothing, anything]):
        sequence = drafter.open(key(number), open_draft(number, tokens_of(1, 9), method, params))
        sequence.propose(Propose(number, 9, (), 3))
    drafts = {answer.key.sequence: answer.draft for answer in run(drafter)}
    assert isinstance(drafts[1].error, NumericalError)
    assert [len(drafts[number].token_ids) for number in range(3)] == [3, 0, 3]
    assert 1 not in {sequence.key.sequence for sequence in drafter._resident.values()}


def test_nan_logits_fail_their_own_request_alone() -> None:
    module = copy.deepcopy(plain_model())
    model = adopt_model(module, "tiny")
    module.model.embed_tokens.weight[7] = torch.nan
    drafter = new_drafter(model=model)
    # The sick sequence has the pool's first block; others are padded beside it, and get its blocks after it.
    prompts = [[7, 1, 2, 3, 4, 5, 6, 8, 9], [1, 2, 3, 4, 5], [9, 8, 9, 8, 9, 8, 9, 8, 1, 3], [1, 2]]
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            sequence = drafter.open(key(number), open_draft(number, prompt))
            sequence.propose(Propose(number, len(prompt), (), 2))
        drafts = {answer.key.sequence: answer.draft for answer in run(drafter)}
        assert isinstance(drafts[0].error, NumericalError)
        for number in (1, 2, 3):
            expected = greedy_continuation(prompts[number], 2)
            assert 7 not in expected
            assert drafts[number].token_ids == expected
        for sequence in list(drafter._resident.values()):
            sequence.close()


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_a_token_after_which_nothing_can_be_drawn_is_drafted_as_often_as_q_says(method: Method) -> None:
    """Else a target that trusts q would emit it too seldom."""
    module = copy.deepcopy(plain_model())
    model = adopt_model(module, "tiny")
    prompt, params = tokens_of(3, 6), SamplingParams(temperature=2.0)
    q = sampling.probabilities(plain_logits(prompt)[-1:], [sampling.Window(params, prompt, len(prompt))])[0]
    sick = next(token for token in q.argsort(descending=True).tolist() if token not in prompt)
    module.model.embed_tokens.weight[sick] = torch.nan
    drafter = new_drafter(num_blocks=400, model=model)
    num_draws, lengths = 1500, Counter[int]()
    for start in range(0, num_draws, 100):
        for number in range(start, start + 100):
            sequence = drafter.open(key(number), open_draft(number, prompt, method, params))
            sequence.propose(Propose(number, len(prompt), (), 3))
        for answer in run(drafter):
            assert answer.draft.error is None
            if answer.draft.token_ids[0] == sick:
                lengths[len(answer.draft.token_ids)] += 1
                assert answer.draft.q is not None
                assert len(answer.draft.q.sizes) == 1
        for resident in list(drafter._resident.values()):
            resident.close()
    assert set(lengths) == {1}
    expected = float(q[sick])
    assert expected > 0.02
    spread = (expected * (1 - expected) / num_draws) ** 0.5
    assert abs(lengths[1] / num_draws - expected) < 5 * spread


def test_abandoning_frees_all_kv_and_the_next_draft_is_right() -> None:
    drafter = new_drafter()
    sequence = drafter.open(key(1), open_draft(1, tokens_of(1, 9)))
    other = drafter.open(key(2), open_draft(2, tokens_of(2, 9)))
    run(drafter)
    sequence.propose(Propose(1, 9, (), 5))
    drafter.advance()
    (answer,) = drafter.abandon(InternalError("test"))
    assert (answer.key, answer.draft.committed_length) == (key(1), 9)
    assert isinstance(answer.draft.error, InternalError)
    assert drafter.lm.pool.num_free == drafter.lm.pool.num_blocks
    assert not drafter.busy
    assert propose(drafter, other, 3).token_ids == greedy_continuation(tokens_of(2, 9), 3)


def test_the_same_generator_seed_gives_the_same_drafts_and_the_system_seeds_differ() -> None:
    from draft_service.__main__ import _generator

    def drafts(generator: torch.Generator) -> tuple[int, ...]:
        drafter = ModelDrafter(new_drafter().lm, DraftLimits(), generator)
        order = open_draft(1, tokens_of(1, 9), Method.REJECTION, SamplingParams(temperature=2.0))
        return propose(drafter, drafter.open(key(1), order), 12).token_ids

    assert drafts(_generator(4)) == drafts(_generator(4))
    assert drafts(_generator(None)) != drafts(_generator(None))
    assert paged_model().vocab_size == VOCAB_SIZE


# The prefix cache


@pytest.mark.parametrize("salts", [(b"", b""), (b"a", b"b")])
def test_equal_prompts_opened_together_are_computed_once_within_a_salt(salts: tuple[bytes, bytes]) -> None:
    drafter = new_drafter(limits=DraftLimits(prefill_chunk=64))
    prompt = tokens_of(1, 102)  # 25 blocks of 4 can be shared
    sequences = []
    for number, salt in enumerate(salts):
        order = replace(open_draft(number, prompt), cache_salt=salt)
        sequences.append(drafter.open(key(number), order))
        sequences[-1].propose(Propose(number, 102, (), 3))
    drafts = [answer.draft.token_ids for answer in run(drafter)]
    assert drafts == [greedy_continuation(prompt, 3)] * 2
    first, second = (sequence.kv.block_table for sequence in sequences)
    assert len(set(first) & set(second)) == (25 if salts[0] == salts[1] else 0)


def test_dropped_kv_is_found_again_while_nobody_needs_its_blocks() -> None:
    drafter = new_drafter(limits=DraftLimits(prefill_chunk=16))
    sequence = drafter.open(key(1), open_draft(1, tokens_of(1, 50)))
    propose(drafter, sequence, 2)
    drafter.abandon(InternalError("test"))
    sequence.propose(Propose(1, 50, (), 2))
    # Computed from the start, the first draft alone would take four turns.
    (answer,) = (answer for _ in range(2) for answer in drafter.advance())
    assert answer.draft.token_ids == greedy_continuation(tokens_of(1, 50), 2)


def test_drafted_tokens_never_enter_the_prefix_cache() -> None:
    drafter = new_drafter()
    prompt = tokens_of(1, 14)
    draft = propose(drafter, drafter.open(key(1), open_draft(1, prompt)), 10)
    # Position 15 is the last of a block of which 14 tokens are committed.
    other = drafter.open(key(2), open_draft(2, [*prompt, *draft.token_ids]))
    other.kv.adopt_prefix()
    assert other.kv.kv_len == 12
