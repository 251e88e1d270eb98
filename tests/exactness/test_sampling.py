"""Logits to p: literal tables for every transform, their order, ties, and a slow reference for all."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from specdecode.sampling import (
    Window,
    greedy_tokens,
    inverse_cdf,
    penalised_logits,
    probabilities,
    restrict_top_k,
    token_logprobs,
)
from specdecode.types import SamplingParams, TokenLogprobs

INF = math.inf
Params = SamplingParams
OFF = SamplingParams()


def window(
    params: Params = OFF,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    drafted: Sequence[int] = (),
) -> Window:
    return Window(params, [*prompt, *output], len(prompt), drafted)


def logits_of(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def logs(*masses: float) -> torch.Tensor:
    """One row of logits whose softmax is `masses`."""
    return logits_of([math.log(mass) if mass else -INF for mass in masses])


def p_of(logits: torch.Tensor, params: Params) -> list[float]:
    return probabilities(logits, [window(params)])[0].tolist()


class TestPenalties:
    def test_repetition_divides_positive_logits_and_multiplies_others(self) -> None:
        params = Params(repetition_penalty=2.0)
        logits = logits_of([4.0, -1.0, 0.0, 3.0, -3.0])
        adjusted = penalised_logits(logits, [window(params, prompt=[0, 1], output=[2])])
        assert adjusted.tolist() == [[2.0, -2.0, 0.0, 3.0, -3.0]]

    def test_frequency_counts_and_presence_does_not_both_in_the_output_only(self) -> None:
        logits = logits_of([1.0, 1.0, 1.0, 1.0])
        history = {"prompt": [0, 0, 1], "output": [1, 2, 2, 2]}
        frequency = penalised_logits(logits, [window(Params(frequency_penalty=0.5), **history)])
        presence = penalised_logits(logits, [window(Params(presence_penalty=0.5), **history)])
        assert frequency.tolist() == [[1.0, 0.5, -0.5, 1.0]]
        assert presence.tolist() == [[1.0, 0.5, 0.5, 1.0]]

    def test_repetition_comes_before_the_others(self) -> None:
        params = Params(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.25)
        adjusted = penalised_logits(logits_of([4.0, 4.0]), [window(params, prompt=[0], output=[1, 1])])
        assert adjusted.tolist() == [[2.0, 2.0 - 2 * 1.0 - 0.25]]

    def test_negative_penalties_encourage(self) -> None:
        params = Params(frequency_penalty=-0.5, presence_penalty=-1.0)
        adjusted = penalised_logits(logits_of([0.0, 0.0]), [window(params, prompt=[0], output=[1, 1])])
        assert adjusted.tolist() == [[0.0, 2.0]]

    def test_each_row_counts_committed_tokens_and_earlier_drafts_once(self) -> None:
        """Row i sees prompt + output + drafted[:i]: not its own draft, none twice, nothing rejected."""
        params = Params(frequency_penalty=1.0)
        logits = torch.zeros(4, 4, dtype=torch.float64)
        adjusted = penalised_logits(logits, [window(params, prompt=[0], output=[1], drafted=[2, 1, 2])])
        assert adjusted.neg().tolist() == [[0, 1, 0, 0], [0, 1, 1, 0], [0, 2, 1, 0], [0, 2, 2, 0]]

    def test_each_row_repeats_committed_tokens_and_earlier_drafts(self) -> None:
        params = Params(repetition_penalty=2.0)
        adjusted = penalised_logits(torch.ones(3, 4), [window(params, prompt=[0], drafted=[2, 3])])
        assert adjusted.tolist() == [[0.5, 1, 1, 1], [0.5, 1, 0.5, 1], [0.5, 1, 0.5, 0.5]]

    def test_nothing_remembers_an_earlier_call(self) -> None:
        params = Params(frequency_penalty=1.0)
        logits = torch.zeros(3, 3)
        penalised_logits(logits, [window(params, prompt=[0], output=[1], drafted=[2, 2])])
        adjusted = penalised_logits(logits[:1], [window(params, prompt=[0], output=[1])])
        assert adjusted.neg().tolist() == [[0, 1, 0]]

    def test_an_empty_history_is_no_history(self) -> None:
        params = Params(repetition_penalty=2.0, frequency_penalty=1.0)
        adjusted = penalised_logits(torch.ones(2, 2), [Window(params, [], 0, [1])])
        assert adjusted.tolist() == [[1, 1], [1, -0.5]]


class TestMasks:
    def test_bias_is_added_after_penalties(self) -> None:
        params = Params(repetition_penalty=2.0, logit_bias=((0, 1.0), (2, -100.0)))
        assert penalised_logits(logits_of([4.0, 4.0, 4.0]), [window(params)]).tolist() == [[3.0, 4.0, -96.0]]

    def test_allowed_and_banned_tokens_rule_over_bias(self) -> None:
        params = Params(logit_bias=((0, 50.0), (3, 50.0)), allowed_token_ids=(1, 2, 3), banned_token_ids=(3,))
        assert penalised_logits(torch.ones(1, 4), [window(params)]).tolist() == [[-INF, 1, 1, -INF]]

    @pytest.mark.parametrize(
        ("num_output", "banned_rows"), [(0, 3), (1, 2), (2, 1), (3, 0), (4, 0)], ids=lambda value: str(value)
    )
    def test_stop_tokens_wait_for_min_tokens_counted_with_drafts(
        self, num_output: int, banned_rows: int
    ) -> None:
        params = Params(min_tokens=3, stop_token_ids=(1, 3))
        rows = window(params, prompt=[0, 0], output=[2] * num_output, drafted=[2, 2, 2])
        adjusted = penalised_logits(torch.ones(4, 4), [rows])
        expected = [[1, -INF, 1, -INF]] * banned_rows + [[1, 1, 1, 1]] * (4 - banned_rows)
        assert adjusted.tolist() == expected

    def test_ids_outside_the_vocabulary_restrict_nothing(self) -> None:
        params = Params(
            allowed_token_ids=(0, 1, 9), banned_token_ids=(1, 7), min_tokens=1, stop_token_ids=(100, -1)
        )
        assert penalised_logits(torch.ones(1, 3), [window(params)]).tolist() == [[1, -INF, -INF]]

    def test_logits_that_need_nothing_are_returned_themselves(self) -> None:
        logits = torch.ones(3, 4)
        params = Params(temperature=0.5, top_k=2, top_p=0.5, min_p=0.1, min_tokens=1, stop_token_ids=(1,))
        assert penalised_logits(logits, [window(params, output=[2], drafted=[1, 1])]) is logits

    def test_the_input_is_never_written_to(self) -> None:
        logits = torch.randn(4, 200)
        before = logits.clone()
        for params in PARAMS:
            probabilities(logits, [window(params, output=[1], drafted=[2, 3, 4])])
        assert logits.equal(before)


class TestTruncation:
    def test_temperature_divides(self) -> None:
        assert p_of(logits_of([0.0, math.log(2)]), Params(temperature=0.5)) == pytest.approx([1 / 5, 4 / 5])
        assert p_of(logits_of([0.0, math.log(4)]), Params(temperature=2.0)) == pytest.approx([1 / 3, 2 / 3])

    def test_temperature_zero_is_the_greedy_pick(self) -> None:
        assert p_of(logits_of([1.0, 3.0, 3.0, 2.0]), Params(temperature=0.0)) == [0, 1, 0, 0]

    def test_a_tiny_temperature_does_not_overflow(self) -> None:
        logits = torch.tensor([[50.0, 49.0, -50.0]])
        assert p_of(logits, Params(temperature=1e-38)) == [1, 0, 0]

    def test_top_k_keeps_the_k_best_renormalised(self) -> None:
        assert p_of(logs(0.1, 0.4, 0.3, 0.2), Params(top_k=2)) == pytest.approx([0, 4 / 7, 3 / 7, 0])

    def test_top_k_alone_keeps_all_k_however_small(self) -> None:
        """Float32 may sum to more than 1 before the last token: that is not top-p reached."""
        logits = 6 * torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
        p = probabilities(logits, [window(Params(top_k=20))] * 300)
        assert (p > 0).sum(dim=1).eq(20).all()

    @pytest.mark.parametrize("top_k", [0, 4, 5])
    def test_top_k_off_or_above_the_vocabulary_keeps_all(self, top_k: int) -> None:
        assert p_of(logs(0.1, 0.4, 0.3, 0.2), Params(top_k=top_k)) == pytest.approx([0.1, 0.4, 0.3, 0.2])

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [
            (0.35, [1]),
            (0.45, [1, 2]),
            (0.65, [1, 2]),
            (0.75, [1, 2, 3]),
            (0.85, [1, 2, 3]),
            (0.95, [0, 1, 2, 3]),
        ],
        ids=lambda value: str(value),
    )
    def test_top_p_keeps_the_smallest_prefix_that_reaches_it(self, top_p: float, kept: list[int]) -> None:
        masses = [0.1, 0.4, 0.3, 0.2]
        total = sum(masses[token] for token in kept)
        expected = [mass / total if token in kept else 0 for token, mass in enumerate(masses)]
        assert p_of(logs(*masses), Params(top_p=top_p)) == pytest.approx(expected)

    def test_top_p_reached_exactly_needs_no_more(self) -> None:
        assert p_of(logits_of([0.0, 0.0, 0.0, 0.0]), Params(top_p=0.5)) == [0.5, 0.5, 0, 0]

    def test_top_p_keeps_at_least_one(self) -> None:
        assert p_of(logs(0.3, 0.4, 0.3), Params(top_p=1e-9)) == [0, 1, 0]

    def test_min_p_is_relative_to_the_best(self) -> None:
        assert p_of(logs(0.5, 0.26, 0.24), Params(min_p=0.5)) == pytest.approx([50 / 76, 26 / 76, 0])
        assert p_of(logits_of([0.0, 0.0, -1.0]), Params(min_p=1.0)) == [0.5, 0.5, 0]

    def test_top_p_looks_at_what_top_k_left_renormalised(self) -> None:
        """Of 0.4, 0.3 (0.571, 0.429 after top-k) the first alone reaches 0.55; before top-k it would not."""
        assert p_of(logs(0.1, 0.4, 0.3, 0.2), Params(top_k=2, top_p=0.55)) == [0, 1, 0, 0]

    def test_top_p_looks_at_tempered_probabilities(self) -> None:
        """At temperature ½, 0.4 and 0.3 weigh 16 : 9, against 4 and 1: 16/30 alone reaches 0.5."""
        assert p_of(logs(0.1, 0.4, 0.3, 0.2), Params(temperature=0.5, top_p=0.5)) == [0, 1, 0, 0]

    def test_min_p_looks_at_tempered_probabilities(self) -> None:
        """At temperature 2 the ratio of 0.1 to 0.4 is ½."""
        assert p_of(logs(0.1, 0.4, 0.5), Params(temperature=2.0, min_p=0.44))[0] > 0
        assert p_of(logs(0.1, 0.4, 0.5), Params(temperature=1.0, min_p=0.44))[0] == 0

    def test_min_p_comes_after_top_p(self) -> None:
        """Min-p first would leave 0.4 and 0.3 as 0.571 and 0.429, of which top-p 0.5 keeps one."""
        p = p_of(logs(0.1, 0.4, 0.3, 0.2), Params(top_p=0.5, min_p=0.7))
        assert p == pytest.approx([0, 4 / 7, 3 / 7, 0])

    def test_all_at_once(self) -> None:
        """Temperature ½ squares; top-k leaves 25, 16, 9, 4 of 54; 0.9 needs three (50/54); min-p drops 9."""
        logits = logs(*(x / 15 for x in (1, 5, 3, 2, 4)))
        params = Params(temperature=0.5, top_k=4, top_p=0.9, min_p=0.4)
        assert p_of(logits, params) == pytest.approx([0, 25 / 41, 0, 0, 16 / 41])

    def test_penalties_come_before_temperature(self) -> None:
        params = Params(temperature=0.5, logit_bias=((1, math.log(2)),))
        assert p_of(logits_of([0.0, 0.0]), params) == pytest.approx([1 / 5, 4 / 5])

    def test_banned_tokens_have_no_mass_in_any_path(self) -> None:
        for params in PARAMS:
            allowed = dataclasses.replace(
                params, allowed_token_ids=(3, 4, 90), min_tokens=9, stop_token_ids=(4,)
            )
            p = probabilities(torch.randn(1, 100), [window(allowed)])
            assert p.sum() == pytest.approx(1)
            assert set(p[0].nonzero()[:, 0].tolist()) <= {3, 90}


PARAMS = [
    Params(),
    Params(temperature=0.0),
    Params(temperature=0.7),
    Params(temperature=0.7, top_k=5),
    Params(top_k=70, top_p=0.8),
    Params(top_p=0.6),
    Params(top_p=0.97, min_p=0.01, temperature=1.3),
    Params(min_p=0.2),
    Params(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, temperature=0.8, top_k=7),
    Params(logit_bias=((2, 3.0), (5, -3.0)), banned_token_ids=(7, 8), top_p=0.9),
    Params(min_tokens=3, stop_token_ids=(1, 2)),
]


class TestTies:
    """The lowest id wins, and exactly k survive."""

    def test_greedy(self) -> None:
        logits = logits_of([1.0, 2.0, 2.0], [0.0, 0.0, 0.0], [-INF, -INF, -1.0])
        assert greedy_tokens(logits, [window(), window(), window()]).tolist() == [1, 0, 2]

    def test_greedy_in_a_large_vocabulary(self) -> None:
        logits = torch.zeros(3, 49152)
        for row, ids in enumerate([(40_000, 7, 30_001), (49_151, 49_150), (16, 17, 15)]):
            logits[row, list(ids)] = 1.0
        assert greedy_tokens(logits, [window()] * 3).tolist() == [7, 49_150, 15]

    def test_top_k(self) -> None:
        assert p_of(logits_of([1.0, 2.0, 1.0, 2.0, 1.0]), Params(top_k=2)) == [0, 0.5, 0, 0.5, 0]
        assert p_of(logits_of([0.0, 0.0, 0.0, 0.0]), Params(top_k=1)) == [1, 0, 0, 0]

    @pytest.mark.parametrize("top_k", [1, 2, 5, 50, 63, 64, 65, 1000])
    def test_top_k_across_a_tied_boundary_of_a_large_vocabulary(self, top_k: int) -> None:
        levels = torch.randint(0, 4, (4, 3000), generator=torch.Generator().manual_seed(top_k)).float()
        p = probabilities(levels, [window(Params(top_k=top_k))] * 4)
        for row in range(4):
            kept = sorted(range(3000), key=lambda token: (-levels[row, token].item(), token))[:top_k]
            assert p[row].nonzero()[:, 0].tolist() == sorted(kept)

    @pytest.mark.parametrize("top_p", [0.001, 0.1, 0.5, 0.9])
    def test_top_p_of_a_flat_row(self, top_p: float) -> None:
        p = probabilities(torch.zeros(1, 2**14, dtype=torch.float64), [window(Params(top_p=top_p))])
        assert p[0].nonzero()[:, 0].tolist() == list(range(math.ceil(top_p * 2**14)))

    def test_top_p_at_a_tie(self) -> None:
        assert p_of(logs(0.25, 0.5, 0.25), Params(top_p=0.6)) == pytest.approx([1 / 3, 2 / 3, 0])

    def test_top_p_orders_by_logits_that_round_to_the_same_probability(self) -> None:
        logits = torch.tensor([[0.0, 1e-9, 0.0]], dtype=torch.float64)
        assert probabilities(logits, [window(Params(top_p=0.3, temperature=1e9))])[0].tolist() == [0, 1, 0]

    def test_bfloat16_logits(self) -> None:
        """Coarse logits tie everywhere; k must still survive, in float32."""
        logits = (3 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(0))).bfloat16()
        p = probabilities(logits, [window(Params(top_k=50, top_p=0.9))] * 6)
        exact = probabilities(logits.double(), [window(Params(top_k=50, top_p=0.9))] * 6)
        assert p.dtype == torch.float32
        torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=1e-7)


def reference(
    logits: Sequence[float], params: Params, prompt: Sequence[int], output: Sequence[int]
) -> tuple[npt.NDArray[np.float64], float]:
    """p by full sorts in float64, as the definitions read, and the margin of its closest decision."""
    x = np.array(logits, dtype=np.float64)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        x[token] += bias
    banned = set(params.banned_token_ids)
    if params.allowed_token_ids is not None:
        banned |= set(range(len(x))) - set(params.allowed_token_ids)
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    x[list(banned)] = -INF
    order = np.lexsort((np.arange(len(x)), -x))
    if params.temperature == 0:
        return np.eye(1, len(x), order[0])[0], INF
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp((x - x.max()) / params.temperature)
    margin = INF
    if params.top_p < 1:
        masses = np.cumsum(weights[order]) / weights[order].sum()
        margin = float(np.abs(masses - params.top_p).min())
        order = order[: int(np.sum(masses < params.top_p)) + 1]
    if params.min_p > 0:
        margin = min(margin, float(np.abs(weights[order] - params.min_p).min()))
        order = order[weights[order] >= params.min_p]
    p = np.zeros(len(x))
    p[order] = weights[order] / weights[order].sum()
    return p, margin


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[Window]]:
    """A few windows of any parameters over logits that tie often, in small and large vocabularies."""
    vocab_size = draw(st.sampled_from([2, 5, 70, 1100, 9000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0]))
    tokens = st.integers(0, vocab_size - 1)
    few = st.lists(tokens, max_size=6)
    windows = []
    for _ in range(draw(st.integers(1, 4))):
        params = Params(
            repetition_penalty=draw(st.sampled_from([1.0, 1.25, 0.75])),
            presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
            logit_bias=tuple((token, draw(st.sampled_from([-2.0, 1.5]))) for token in set(draw(few))),
            banned_token_ids=tuple(token for token in draw(few) if token),
            allowed_token_ids=draw(st.none() | few.map(lambda ids: (0, 1, *ids))),
            temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.0])),
            top_k=draw(st.sampled_from([0, 1, 3, 64, 65, 1024, 8192, 8193, 100_000])),
            top_p=draw(st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1])),
            min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
            min_tokens=draw(st.integers(0, 6)),
            stop_token_ids=tuple(token for token in draw(few) if token),
        )
        history = draw(st.lists(tokens, min_size=1, max_size=8))
        windows.append(
            Window(params, history, draw(st.integers(1, len(history))), draw(st.lists(tokens, max_size=3)))
        )
    num_rows = sum(window.num_rows for window in windows)
    coarse = np.round(rng.standard_normal((num_rows, vocab_size)) * spread * 8) / 8
    return torch.from_numpy(coarse), windows


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_row_is_what_the_definitions_say(case: tuple[torch.Tensor, list[Window]]) -> None:
    logits, windows = case
    p64, p32 = probabilities(logits, windows), probabilities(logits.float(), windows)
    assert (p64.dtype, p32.dtype) == (torch.float64, torch.float32)
    row = 0
    for each in windows:
        output = list(each.token_ids[each.num_prompt_tokens :])
        for depth in range(each.num_rows):
            history = [*output, *each.drafted[:depth]]
            expected, margin = reference(
                logits[row].tolist(), each.params, each.token_ids[: each.num_prompt_tokens], history
            )
            if margin > 1e-9:
                np.testing.assert_allclose(p64[row].numpy(), expected, rtol=1e-9, atol=1e-12)
            if margin > 1e-5:
                np.testing.assert_allclose(p32[row].numpy(), expected, rtol=1e-4, atol=1e-6)
            row += 1


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_window_is_its_rows_one_by_one(case: tuple[torch.Tensor, list[Window]], dtype: torch.dtype) -> None:
    """To the last bit: neither the batch nor the drafts after a row have influence on it."""
    logits, windows = case[0].to(dtype), case[1]
    together, greedy = probabilities(logits, windows), greedy_tokens(logits, windows)
    row = 0
    for each in windows:
        for depth in range(each.num_rows):
            alone = Window(each.params, [*each.token_ids, *each.drafted[:depth]], each.num_prompt_tokens)
            assert together[row].equal(probabilities(logits[row : row + 1], [alone])[0])
            assert greedy[row] == greedy_tokens(logits[row : row + 1], [alone])[0]
            row += 1


@settings(max_examples=50, deadline=None)
@given(cases())
def test_greedy_is_the_one_hot_of_temperature_zero(case: tuple[torch.Tensor, list[Window]]) -> None:
    logits, windows = case
    cold = [
        dataclasses.replace(each, params=dataclasses.replace(each.params, temperature=0.0))
        for each in windows
    ]
    assert probabilities(logits, cold).argmax(dim=1).equal(greedy_tokens(logits, windows))


def test_a_row_of_nan_or_without_permitted_tokens_is_nan_and_alone() -> None:
    for params in PARAMS:
        nothing = dataclasses.replace(params, allowed_token_ids=(), banned_token_ids=())
        logits = torch.randn(3, 100)
        logits[1, 50] = torch.nan
        p = probabilities(logits, [window(params), window(params), window(nothing)])
        assert p[0].equal(probabilities(logits[:1], [window(params)])[0])
        assert p[1].isnan().any()
        assert p[2].isnan().any()
        assert set(inverse_cdf(p, torch.full((3,), 0.5)).tolist()) <= set(range(100))


class TestInverseCdf:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])

    @pytest.mark.parametrize(
        ("u", "token"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4), (1.0, 4)]
    )
    def test_cuts_at_the_cumulative_sums(self, u: float, token: int) -> None:
        assert inverse_cdf(self.p, torch.tensor([u], dtype=torch.float64)).tolist() == [token]

    def test_scales_with_the_total(self) -> None:
        assert inverse_cdf(self.p * 3e-5, torch.tensor([0.7499], dtype=torch.float64)).tolist() == [3]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_never_returns_a_token_of_probability_zero(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        p = torch.rand(2000, 50, generator=generator, dtype=torch.float64) ** 8
        p = p.masked_fill(torch.rand(2000, 50, generator=generator) < 0.7, 0).to(dtype)
        p[p.sum(dim=1) == 0, 7] = 1
        for u in (0.0, 2.0**-53, 0.3, 1 - 2.0**-24, 1 - 2.0**-53, 1.0):
            tokens = inverse_cdf(p, torch.full((2000,), u, dtype=torch.float64))
            assert (p.gather(1, tokens[:, None]) > 0).all()

    def test_a_last_token_too_small_to_move_the_sum_is_no_trap(self) -> None:
        p = torch.tensor([[1.0, 1e-30, 0.0]], dtype=torch.float64)
        assert inverse_cdf(p, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [0]

    def test_samples_are_distributed_as_p(self) -> None:
        masses = np.array([0.5, 0.0, 0.2, 0.29, 0.01])
        u = torch.rand(100_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        tokens = inverse_cdf(torch.from_numpy(masses).expand(100_000, -1), u)
        counts = np.bincount(tokens.numpy(), minlength=5)
        assert counts[1] == 0
        assert stats.chisquare(counts[masses > 0], masses[masses > 0] * 100_000).pvalue > 1e-4

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        p = torch.softmax(torch.randn(9, 5000), dim=1)
        u = torch.rand(9, dtype=torch.float64)
        assert inverse_cdf(p, u).tolist() == [
            inverse_cdf(p[i : i + 1], u[i : i + 1]).item() for i in range(9)
        ]


class TestRestrictTopK:
    def test_keeps_the_best_in_order_renormalised(self) -> None:
        token_ids, probs = restrict_top_k(torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64), 3)
        assert token_ids.tolist() == [[1, 3, 2]]
        assert probs[0].tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9])

    def test_ties_go_to_the_lowest_ids(self) -> None:
        p = torch.full((1, 500), 1 / 500)
        assert restrict_top_k(p, 64)[0].tolist() == [list(range(64))]

    def test_entries_beyond_the_support_have_no_mass(self) -> None:
        token_ids, probs = restrict_top_k(torch.tensor([[0.0, 0.5, 0.0, 0.5]]), 3)
        assert token_ids[0, :2].tolist() == [1, 3]
        assert probs.tolist() == [[0.5, 0.5, 0.0]]

    def test_a_small_vocabulary_is_returned_whole(self) -> None:
        assert restrict_top_k(torch.tensor([[0.25, 0.75]]), 64)[0].tolist() == [[1, 0]]


class TestLogprobs:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0]], dtype=torch.float64)

    def test_are_of_the_raw_logits_with_rank_and_top(self) -> None:
        first, second = token_logprobs(self.logits, torch.tensor([2, 0]), 2)
        total = math.log(1 + 2 * math.e**2 + math.e)
        assert (first.token_id, first.rank) == (2, 3)
        assert first.logprob == pytest.approx(1 - total)
        assert [token for token, _ in first.top] == [1, 3]
        assert [value for _, value in first.top] == pytest.approx([2 - total, 2 - total])
        assert (second.token_id, second.rank, second.top[0][0]) == (0, 1, 0)

    def test_rank_orders_ties_by_id(self) -> None:
        ranks = [token_logprobs(self.logits[:1], torch.tensor([token]), 0)[0].rank for token in range(4)]
        assert ranks == [4, 1, 3, 2]

    def test_without_alternatives_the_top_is_empty(self) -> None:
        results = token_logprobs(self.logits, torch.tensor([1, 1]), 0)
        assert all(isinstance(result, TokenLogprobs) and result.top == () for result in results)

    def test_more_alternatives_than_tokens_are_all_of_them(self) -> None:
        assert len(token_logprobs(self.logits, torch.tensor([0, 0]), 20)[0].top) == 4


def test_rows_that_do_not_fit_the_windows_are_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="3 rows of logits for 2 rows"):
        probabilities(torch.zeros(3, 4), [window(drafted=[1])])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.9, 0.99, 0.999]))
def test_top_p_of_flat_and_of_peaked_rows_in_one_batch(seed: int, top_p: float) -> None:
    """Rows that need lists of different lengths, the whole vocabulary included, don't disturb one another."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(
        rng.standard_normal((5, 12_000)) * np.array([[9.0], [0.01], [1.0], [3.0], [0.5]])
    )
    p = probabilities(logits, [window(Params(top_p=top_p))] * 5)
    for row in range(5):
        expected, margin = reference(logits[row].tolist(), Params(top_p=top_p), [0], [])
        assume(margin > 1e-12)
        np.testing.assert_allclose(p[row].numpy(), expected, rtol=1e-9, atol=1e-12)
