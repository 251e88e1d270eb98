"""Losslessness, proved: all that a verification can emit, with exact probabilities, against the target's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from specdecode.types import Method
from specdecode.verification import Drafts, Verified, verify_block, verify_picks, verify_rejection
from tests.exactness.enumeration import (
    Outcome,
    block_chances,
    distance_from_target,
    enumerate_round,
    path_of,
)
from tests.exactness.table_model import TableModel, Tokens

EXACT = 1e-12
SAMPLED = (Method.REJECTION, Method.BLOCK)
DEPTH = 3
Verify = Callable[[torch.Tensor, torch.Tensor, Drafts, torch.Tensor, torch.Tensor], Verified]


def target_of(seed: int, vocab_size: int) -> TableModel:
    return TableModel.random(seed, vocab_size, DEPTH)


DRAFTS = {
    "full": lambda seed, vocab_size: TableModel.random(seed, vocab_size, DEPTH),
    "near": lambda seed, vocab_size: blended(target_of(seed, vocab_size), 0.8, seed),
    "sparse": lambda seed, vocab_size: TableModel.random(seed, vocab_size, DEPTH, support=2),
    "one-hot": lambda seed, vocab_size: TableModel.random(seed, vocab_size, DEPTH).one_hot(),
}


def blended(target: TableModel, share: float, seed: int) -> TableModel:
    """A draft that is the target in part, as real drafts are."""
    other = TableModel.random(seed + 1000, target.vocab_size, target.depth)
    mixed = {
        history: [share * p + (1 - share) * q for p, q in zip(row, other.table[history], strict=True)]
        for history, row in target.table.items()
    }
    return TableModel(target.vocab_size, target.depth, mixed)


def assert_lossless(outcome: Outcome, target: TableModel, num_draft_tokens: int) -> None:
    assert sum(outcome.emitted.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance_from_target(outcome.emitted, target, num_draft_tokens + 1) < EXACT


@pytest.mark.parametrize("vocab_size", [3, 4, 5])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("method", SAMPLED, ids=lambda method: method.value)
def test_emits_the_targets_distribution(
    method: Method, draft: str, num_draft_tokens: int, vocab_size: int
) -> None:
    for seed in range(3 if vocab_size < 5 else 1):
        target = target_of(seed, vocab_size)
        outcome = enumerate_round(method, target, DRAFTS[draft](seed + 50, vocab_size), num_draft_tokens)
        assert_lossless(outcome, target, num_draft_tokens)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_emits_the_targets_greedy_tokens(draft: str, num_draft_tokens: int) -> None:
    target = target_of(3, 4).one_hot()
    outcome = enumerate_round(Method.GREEDY, target, DRAFTS[draft](4, 4), num_draft_tokens)
    assert_lossless(outcome, target, num_draft_tokens)


@pytest.mark.parametrize("method", SAMPLED, ids=lambda method: method.value)
@pytest.mark.parametrize(("target_support", "draft_support"), [(2, 4), (2, 2), (1, 3), (3, 1), (1, 1)])
def test_tokens_of_probability_zero_are_exact_and_never_emitted(
    method: Method, target_support: int, draft_support: int
) -> None:
    for seed in range(4):
        target = TableModel.random(seed, 4, DEPTH, support=target_support)
        draft = TableModel.random(seed + 9, 4, DEPTH, support=draft_support)
        outcome = enumerate_round(method, target, draft, 3)
        assert_lossless(outcome, target, 3)
        assert all(target.probability(tokens) > 0 for tokens, mass in outcome.emitted.items() if mass > 0)


@pytest.mark.parametrize("method", SAMPLED, ids=lambda method: method.value)
@pytest.mark.parametrize("support", [None, 2])
def test_a_draft_equal_to_the_target_is_always_accepted(method: Method, support: int | None) -> None:
    target = TableModel.random(5, 4, DEPTH, support=support)
    outcome = enumerate_round(method, target, target, 3)
    assert_lossless(outcome, target, 3)
    assert outcome.mean_accepted == pytest.approx(3, abs=EXACT)


@pytest.mark.parametrize("method", SAMPLED, ids=lambda method: method.value)
@pytest.mark.parametrize("draft", DRAFTS)
def test_an_untrusted_draft_verified_as_one_hot_is_exact(method: Method, draft: str) -> None:
    target = target_of(6, 4)
    outcome = enumerate_round(method, target, DRAFTS[draft](7, 4), 3, trust_draft=False)
    assert_lossless(outcome, target, 3)


@pytest.mark.parametrize("method", SAMPLED, ids=lambda method: method.value)
def test_a_q_that_was_not_sampled_from_is_noticed(method: Method) -> None:
    target, draft = target_of(1, 3), target_of(2, 3)
    outcome = enumerate_round(method, target, draft, 2, sent=target_of(3, 3))
    assert sum(outcome.emitted.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance_from_target(outcome.emitted, target, 3) > 0.01


class TestWhichDraftsAreSent:
    """Whether position i is drafted may depend on what came before x_i, never on x_i itself."""

    target = TableModel.constant((0.7, 0.3))
    draft = TableModel.constant((0.5, 0.5))

    def test_dropping_a_draft_because_it_looks_unlikely_breaks_rejection(self) -> None:
        outcome = enumerate_round(
            Method.REJECTION, self.target, self.draft, 1, keep=lambda tokens: int(tokens[0] == 0)
        )
        first = {token: sum(m for t, m in outcome.emitted.items() if t[0] == token) for token in (0, 1)}
        assert first == pytest.approx({0: 0.85, 1: 0.15}, abs=EXACT)
        assert distance_from_target(outcome.emitted, self.target, 2) == pytest.approx(0.15, abs=EXACT)

    def test_dropping_a_draft_because_it_looks_unlikely_breaks_block(self) -> None:
        outcome = enumerate_round(
            Method.BLOCK, self.target, self.draft, 1, keep=lambda tokens: int(tokens[0] == 0)
        )
        assert distance_from_target(outcome.emitted, self.target, 2) == pytest.approx(0.15, abs=EXACT)

    @pytest.mark.parametrize("method", SAMPLED, ids=lambda method: method.value)
    def test_stopping_by_what_came_before_is_exact(self, method: Method) -> None:
        def keep(tokens: Tokens) -> int:
            """Draft on only while the token before was 0."""
            return next((i + 1 for i, token in enumerate(tokens) if token != 0), len(tokens))

        target = target_of(8, 3)
        outcome = enumerate_round(method, target, target_of(9, 3), 3, keep=keep)
        assert_lossless(outcome, target, 3)

    def test_greedy_is_exact_under_any_truncation(self) -> None:
        target = target_of(10, 3).one_hot()
        outcome = enumerate_round(
            Method.GREEDY, target, target_of(11, 3), 3, keep=lambda tokens: sum(tokens) % 4
        )
        assert_lossless(outcome, target, 3)


@pytest.mark.parametrize("vocab_size", [3, 4])
@pytest.mark.parametrize("draft", DRAFTS)
def test_block_never_accepts_fewer_than_rejection(draft: str, vocab_size: int) -> None:
    gains = []
    for seed in range(8):
        models = target_of(seed, vocab_size), DRAFTS[draft](seed + 70, vocab_size)
        rejection, block = (enumerate_round(method, *models, 3).mean_accepted for method in SAMPLED)
        gains.append(block - rejection)
    assert min(gains) >= -EXACT
    # A one-hot q is nowhere below p, so nothing is ever left over for a later position.
    assert max(gains) < EXACT if draft == "one-hot" else max(gains) > 1e-3


def test_block_accepts_as_much_as_the_paper_says() -> None:
    """The paper's example: p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: 11/9 tokens against 10/9."""
    target, draft = TableModel.constant((1 / 3, 2 / 3)), TableModel.constant((2 / 3, 1 / 3))
    rejection, block = (enumerate_round(method, target, draft, 2).mean_accepted for method in SAMPLED)
    assert rejection == pytest.approx(10 / 9, abs=EXACT)
    assert block == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("method", [Method.GREEDY, *SAMPLED], ids=lambda method: method.value)
def test_tested_and_passed_are_unbiased(method: Method, draft: str) -> None:
    target = target_of(12, 4).one_hot() if method is Method.GREEDY else target_of(12, 4)
    outcome = enumerate_round(method, target, DRAFTS[draft](13, 4), 3)
    assert outcome.tested == pytest.approx([outcome.at_least(i) for i in range(3)], abs=EXACT)
    assert outcome.passed == pytest.approx([outcome.at_least(i + 1) for i in range(3)], abs=EXACT)


def test_passed_of_one_position_is_the_overlap_of_p_and_q() -> None:
    verified = verify_rejection(
        *one_window([[0.5, 0.3, 0.2], [1, 0, 0]], [2], [[0.2, 0.2, 0.6]]), *coins(0.9)
    )
    assert verified.tested.tolist() == [[1.0]]
    assert verified.passed[0, 0].item() == pytest.approx(0.2 + 0.2 + 0.2)


def one_window(
    p: list[list[float]], token_ids: list[int], q: list[list[float]]
) -> tuple[torch.Tensor, torch.Tensor, Drafts]:
    """Arguments of a verification of one window whose q is given over the whole vocabulary."""
    probs = torch.tensor([q], dtype=torch.float64)
    ids = torch.arange(probs.shape[2]).expand(probs.shape)
    drafts = Drafts(torch.tensor([token_ids]), torch.tensor([len(token_ids)]), ids, probs)
    return torch.tensor(p, dtype=torch.float64), torch.tensor([0]), drafts


def coins(*accept: float, sample: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([accept], dtype=torch.float64), torch.tensor([sample], dtype=torch.float64)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_a_coin_of_zero_does_not_accept_a_token_of_probability_zero(verify: Verify) -> None:
    verified = verify(*one_window([[0.0, 1.0], [0.5, 0.5]], [0], [[1.0, 0.0]]), *coins(0.0, sample=0.0))
    assert (verified.accepted.item(), verified.next_token.item()) == (0, 1)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
@pytest.mark.parametrize(("coin", "accepted"), [(0.5, 0), (0.49999999999999994, 1)])
def test_acceptance_is_strict(verify: Verify, coin: float, accepted: int) -> None:
    verified = verify(*one_window([[0.25, 0.75], [0.5, 0.5]], [0], [[0.5, 0.5]]), *coins(coin))
    assert verified.accepted.item() == accepted


def test_block_goes_on_after_a_failure() -> None:
    """h_1 = 0 here (p_1·p is nowhere above q), h_2 = p_2 = 1/2: a success at 2 overrules the failure at 1."""
    arguments = one_window([[0.25, 0.75], [1.0, 0.0], [0.0, 1.0]], [0, 0], [[0.5, 0.5], [1.0, 0.0]])
    verified = verify_block(*arguments, *coins(0.999, 0.499))
    assert (verified.accepted.item(), verified.next_token.item()) == (2, 1)
    assert verify_block(*arguments, *coins(0.0, 0.5)).accepted.item() == 0


def test_recovered_tokens_come_from_the_residual() -> None:
    """p − q = (−0.3, 0.1, 0.2): token 1 up to u = 1/3, then token 2."""
    arguments = one_window([[0.2, 0.4, 0.4], [1, 0, 0]], [0], [[0.5, 0.3, 0.2]])
    tokens = [
        verify_rejection(*arguments, *coins(0.99, sample=u)).next_token.item()
        for u in (0.0, 0.333, 0.334, 0.999)
    ]
    assert tokens == [1, 1, 2, 2]


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_a_residual_without_mass_falls_back_to_p(verify: Verify) -> None:
    """q above p at every token (it can't be, but for rounding): p is sampled, no id outside it appears."""
    p, first_row, drafts = one_window([[0.25, 0.0, 0.25], [1, 0, 0]], [0], [[0.5, 0.0, 0.5]])
    tokens = [
        verify(p, first_row, drafts, *coins(0.99, sample=u)).next_token.item() for u in (0.0, 0.4, 0.6, 0.9)
    ]
    assert tokens == [0, 0, 2, 2]


def test_an_unnormalised_q_means_what_was_sampled_from_it() -> None:
    p, first_row, drafts = one_window([[0.25, 0.75], [0.5, 0.5]], [0], [[0.5, 0.5]])
    doubled = Drafts(drafts.token_ids, drafts.lengths, drafts.q_token_ids, drafts.q_probs * 2)
    for coin in (0.49, 0.51):
        assert_same(
            verify_rejection(p, first_row, doubled, *coins(coin)),
            verify_rejection(p, first_row, drafts, *coins(coin)),
        )


def assert_same(one: Verified, other: Verified) -> None:
    assert one.accepted.equal(other.accepted)
    assert one.next_token.equal(other.next_token)
    torch.testing.assert_close(one.tested, other.tested, rtol=0, atol=EXACT)
    torch.testing.assert_close(one.passed, other.passed, rtol=0, atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [Method.GREEDY, *SAMPLED], ids=lambda method: method.value)
def test_a_ragged_batch_is_its_windows_one_by_one(method: Method, dtype: torch.dtype) -> None:
    """Padding, neighbours, the order of rows and windows without drafts have no influence."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 0, 1, 5, 0, 2, 5])
    first_row = torch.tensor([8, 0, 1, 12, 18, 3, 20])  # not in order, with unused rows between
    p = torch.softmax(2 * torch.randn(30, 11, generator=generator, dtype=torch.float64), dim=1).to(dtype)
    noise = torch.rand(7, 6, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(11, generator=generator)[:4] for _ in range(7 * 5)]).view(7, 5, 4)
    probs = torch.softmax(torch.randn(7, 5, 4, generator=generator), dim=2)
    padding = torch.arange(5) >= lengths[:, None]
    token_ids = ids[:, :, 0].masked_fill(padding, -1)
    batch = Drafts(token_ids, lengths, ids.masked_fill(padding[:, :, None], 10**6), probs)
    batch.q_probs[padding] = torch.nan
    whole = run(method, p, first_row, batch, noise)
    for window, length in enumerate(lengths.tolist()):
        rows = slice(int(first_row[window]), int(first_row[window]) + length + 1)
        alone = Drafts(
            token_ids[window : window + 1, :length],
            lengths[window : window + 1],
            ids[window : window + 1, :length],
            probs[window : window + 1, :length],
        )
        coins_alone = torch.cat([noise[window : window + 1, :length], noise[window : window + 1, 5:]], dim=1)
        expected = run(method, p[rows], torch.tensor([0]), alone, coins_alone)
        got = Verified(
            *(x[window : window + 1] for x in (whole.accepted, whole.next_token)),
            *(x[window : window + 1, :length] for x in (whole.tested, whole.passed)),
        )
        assert_same(got, expected)
        assert not whole.tested[window, length:].any()
        assert not whole.passed[window, length:].any()


def run(
    method: Method, p: torch.Tensor, first_row: torch.Tensor, drafts: Drafts, noise: torch.Tensor
) -> Verified:
    if method is Method.GREEDY:
        return verify_picks(p.argmax(dim=1), first_row, drafts)
    verify = verify_block if method is Method.BLOCK else verify_rejection
    return verify(p, first_row, drafts, noise[:, :-1], noise[:, -1])


@pytest.mark.parametrize("method", [Method.GREEDY, *SAMPLED], ids=lambda method: method.value)
def test_a_batch_without_drafts_or_without_windows_works(method: Method) -> None:
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    empty = Drafts(
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, 0, 0, dtype=torch.int64),
        torch.zeros(2, 0, 0),
    )
    verified = run(method, p, torch.tensor([0, 1]), empty, torch.rand(2, 1))
    assert verified.accepted.tolist() == [0, 0]
    assert verified.next_token.tolist() == [1, 0]
    assert verified.tested.shape == verified.passed.shape == (2, 0)
    none = Drafts(*(x[:0] for x in (empty.token_ids, empty.lengths, empty.q_token_ids, empty.q_probs)))
    assert run(method, p, torch.tensor([], dtype=torch.int64), none, torch.rand(0, 1)).accepted.shape == (0,)


@pytest.mark.parametrize("method", SAMPLED, ids=lambda method: method.value)
def test_a_row_of_nan_ends_in_some_token_and_leaves_the_batch_alone(method: Method) -> None:
    p = torch.full((6, 4), 0.25)
    p[:3] = torch.nan
    ids = torch.arange(4).expand(2, 2, 4)
    drafts = Drafts(
        torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 2]), ids, torch.full((2, 2, 4), 0.25)
    )
    verified = run(method, p, torch.tensor([0, 3]), drafts, torch.full((2, 3), 0.3))
    assert 0 <= verified.next_token[0] < 4
    assert (verified.accepted[1].item(), verified.next_token[1].item()) == (2, 1)


def test_the_enumeration_covers_what_it_should() -> None:
    """In the tables every count of accepted drafts happens, and h is often strictly inside (0, 1)."""
    target, draft = target_of(0, 4), DRAFTS["full"](50, 4)
    for method in SAMPLED:
        outcome = enumerate_round(method, target, draft, 3)
        assert all(outcome.accepted[count] > 1e-3 for count in range(4))
    chances = [
        h
        for tokens in product(range(4), repeat=3)
        for h in block_chances(path_of(target, draft, tokens, 1.0))[1][:-1]
    ]
    assert sum(0 < h < 1 for h in chances) > len(chances) / 4
