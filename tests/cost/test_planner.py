from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode.cost import DraftCosts, StepCosts
from specdecode.errors import InvalidArgumentError
from specdecode.planner.explain import explain
from specdecode.planner.hardware import PROFILES, HardwareProfile, hardware_profile
from specdecode.planner.picture import draw
from specdecode.planner.plan import (
    FixedDraftCost,
    MeasuredSystem,
    Question,
    Row,
    paying_range,
    plan_row,
)
from specdecode.planner.roofline import Form, Replica, RooflineSystem
from specdecode.planner.shapes import SHAPES, ModelShape, model_shape

H100 = PROFILES["h100"]
ON_L4 = RooflineSystem(Replica(model_shape("8B"), PROFILES["l4"]), Replica(model_shape("1B"), PROFILES["l4"]))
QUESTION = Question(tuple(0.8 ** (i + 1) for i in range(8)), (1, 3, 7))
BATCHES = (1, 4, 16, 64, 256)


def system(target: str = "70B", draft: str = "1B", group: int = 4, **fields: Any) -> RooflineSystem:
    shared = Replica(model_shape(target), H100, group, **fields)
    return RooflineSystem(shared, replace(shared, shape=model_shape(draft)))


def rows_of(of: RooflineSystem | MeasuredSystem, context: int = 2000) -> list[Row]:
    return [plan_row(of, QUESTION, batch, context) for batch in BATCHES]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("135M", 0.1345e9),
        ("0.6B", 0.596e9),
        ("1B", 1.236e9),
        ("3B", 3.21e9),
        ("7B", 7.25e9),
        ("8B", 8.03e9),
        ("14B", 14.8e9),
        ("32B", 32.8e9),
        ("70B", 70.6e9),
        ("405B", 405.9e9),
        ("8x7B", 46.7e9),
        ("30B-A3B", 30.5e9),
        ("235B-A22B", 235.1e9),
    ],
)
def test_known_shapes_have_the_parameters_of_their_models(name: str, parameters: float) -> None:
    assert model_shape(name).num_parameters == pytest.approx(parameters, rel=0.005)


def test_experts_touched_grow_from_those_of_one_token_to_all() -> None:
    moe = model_shape("30B-A3B")
    touched = [moe.experts_touched(tokens) for tokens in (1, 2, 16, 64, 10_000)]
    assert touched[0] == pytest.approx(8)
    assert touched[1] == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert all(a < b for a, b in itertools.pairwise(touched))
    assert touched[-1] == pytest.approx(128)
    assert model_shape("8B").experts_touched(5) == 1


def test_grouped_heads_and_windows_shrink_kv() -> None:
    assert model_shape("8B").kv_bytes(1000, 2) == 1000 * 32 * 8 * 128 * 2 * 2
    gemma = model_shape("27B")
    assert gemma.kv_bytes(1000, 2) == 1000 * 62 * 16 * 128 * 2 * 2
    assert gemma.kv_bytes(10_000, 2) == (10_000 * 10 + 1024 * 52) * 16 * 128 * 2 * 2


LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_a_shape_is_read_from_a_configuration_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    expected = replace(model_shape("8B"), name=tmp_path.name)
    assert model_shape(str(tmp_path)) == expected
    assert model_shape(str(tmp_path / "config.json")) == expected


def test_experts_and_windows_are_read_from_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    moe = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    layers = ["sliding_attention", "full_attention"] * 16
    path.write_text(json.dumps({**LLAMA, **moe, "sliding_window": 1024, "layer_types": layers}))
    shape = model_shape(str(path))
    assert (shape.num_experts, shape.experts_per_token, shape.intermediate_size) == (128, 8, 768)
    assert (shape.sliding_window, shape.num_windowed_layers) == (1024, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "experts_per_token"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_a_configuration_that_can_not_be_planned_with_is_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(InvalidArgumentError, match=named):
        model_shape(str(path))


def test_an_unknown_size_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidArgumentError, match="70B"):
        model_shape("71B")
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        model_shape("nowhere/config.json")


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".toml"])
def test_a_profile_of_ones_own_is_read_from_a_file(tmp_path: Path, suffix: str) -> None:
    fields = {"memory_bandwidth": 1e12, "memory_bytes": 48e9, "link_bandwidth": 3e10}
    path = tmp_path / f"mine{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps({"flops": {"bf16": 2e14}, **fields}))
    elif suffix == ".yaml":
        lines = [f"{name}: {value:.0e}" for name, value in fields.items()]
        path.write_text("\n".join(["flops: {bf16: 2e14}", *lines]).replace("5e+10", "4.8e10"))
    else:
        path.write_text(
            "\n".join(f"{name} = {value}" for name, value in fields.items()) + "\nflops.bf16 = 2e14"
        )
    profile = hardware_profile(str(path))
    assert profile.name == "mine"
    assert (profile.memory_bandwidth, profile.memory_bytes, profile.flops["bf16"]) == (1e12, 48e9, 2e14)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"memory_bandwidth": 0}, "memory_bandwidth"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"link_bandwidth": "fast"}, "link_bandwidth"),
        ({"compute_efficiency": 1.5}, "compute_efficiency"),
        ({"overhead_seconds": -1}, "overhead_seconds"),
        ({"flops": {"fp8": 1e15}}, "bf16"),
        ({"flops": {"bf16": 0}}, "flops.bf16"),
        ({"flops": {"bf16": 1e14, "fp2": 1e15}}, "flops.fp2"),
        ({"flops": None}, "flops"),
        ({"bandwidth": 1}, "bandwidth"),
    ],
)
def test_a_profile_that_can_not_be_is_refused_by_file_and_field(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = tmp_path / "mine.json"
    whole = {"flops": {"bf16": 1e14}, "memory_bandwidth": 1e12, "memory_bytes": 1e10, "link_bandwidth": 1e10}
    path.write_text(json.dumps({**whole, **change}))
    with pytest.raises(InvalidArgumentError, match=named) as caught:
        hardware_profile(str(path))
    assert str(path) in caught.value.message


def test_an_unknown_gpu_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="a100, h100"):
        hardware_profile("h101")
    (tmp_path / "cut.json").write_text("{")
    for name in ("cut.json", "none.json"):
        with pytest.raises(InvalidArgumentError, match="can't be read"):
            hardware_profile(str(tmp_path / name))
    (tmp_path / "half.json").write_text('{"memory_bytes": 1e9}')
    with pytest.raises(InvalidArgumentError, match="not whole"):
        hardware_profile(str(tmp_path / "half.json"))


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
@pytest.mark.parametrize("name", ["8B", "30B-A3B"])
def test_a_step_never_gets_cheaper_and_overlapping_never_dearer(profile: HardwareProfile, name: str) -> None:
    replica = Replica(model_shape(name), profile)
    for form in Form:
        seconds = [replica.step_seconds(n, n, 8, 1000, form) for n in (8, 16, 64, 256, 1024)]
        assert all(a <= b for a, b in itertools.pairwise(seconds))
        assert replica.step_seconds(64, 64, 8, 2000, form) >= replica.step_seconds(64, 64, 8, 1000, form)
    assert replica.step_seconds(64, 64, 8, 1000, Form.MAX) < replica.step_seconds(64, 64, 8, 1000, Form.SUM)


def test_more_gpus_share_weights_and_kv_and_pay_for_their_links() -> None:
    one, four = (Replica(model_shape("8B"), H100, group).parts(64, 64, 64, 1000) for group in (1, 4))
    for part in ("weights", "compute", "kv"):
        assert getattr(four, part) == pytest.approx(getattr(one, part) / 4)
    assert one.links == 0
    assert four.links > 2 * 32 * H100.link_seconds
    sixteen = Replica(model_shape("8B"), H100, 16).parts(64, 64, 64, 1000)
    assert sixteen.kv == pytest.approx(one.kv / 8)


def test_fewer_bytes_a_weight_read_faster_and_int4_computes_in_bf16() -> None:
    parts = {
        dtype: Replica(model_shape("8B"), H100, 1, dtype).parts(64, 64, 1, 1)
        for dtype in ("bf16", "fp8", "int4")
    }
    assert parts["fp8"].weights == pytest.approx(parts["bf16"].weights / 2)
    assert parts["int4"].weights == pytest.approx(parts["bf16"].weights / 4)
    assert parts["int4"].compute == pytest.approx(parts["bf16"].compute)
    assert parts["fp8"].compute < 0.51 * parts["bf16"].compute


def test_the_step_table_agrees_with_the_roofline_where_fixed_lengths_look() -> None:
    for form in Form:
        planned = replace(system(), form=form)
        costs = planned.steps(32, 2000, 8)
        for length in range(9):
            tokens = 32 * (length + 1)
            exact = planned.target.step_seconds(tokens, tokens, 32, 2000, form)
            assert costs.step(tokens, None, 32 * 2000) == pytest.approx(exact)


def test_the_drafts_weights_cost_kv_slots_and_its_prefill_time_to_first_token() -> None:
    planned = system()
    alone, together = planned.slots(2000, False), planned.slots(2000, True)
    assert 0 < together < alone
    assert planned.prefill_seconds(2000, False) < planned.prefill_seconds(2000, True)
    free = 80e9 * 0.9 - planned.target.weight_bytes
    assert alone == int(free / (2000 * 80 * 2 * 128 * 2 * 2))


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    with pytest.raises(InvalidArgumentError, match=r"144 GB.*on one GPU.*72 GB"):
        system(group=1)
    with pytest.raises(InvalidArgumentError, match="no room for one sequence"):
        plan_row(system(group=2), QUESTION, 1, 2000)
    with pytest.raises(InvalidArgumentError, match="draft_tp"):
        RooflineSystem(Replica(model_shape("8B"), H100, 1), Replica(model_shape("1B"), H100, 2))
    with pytest.raises(InvalidArgumentError, match="dtype"):
        Replica(model_shape("8B"), H100, dtype="fp3")


@pytest.mark.parametrize("form", list(Form))
def test_the_policy_is_never_slower_than_off_or_any_fixed_length_that_shares_its_memory(form: Form) -> None:
    planned = replace(system(), form=form)
    for row in rows_of(planned):
        assert row.auto.throughput >= row.best_fixed[1].throughput * (1 - 1e-9)
        if row.auto.running == row.off.running:
            assert row.auto.throughput >= row.off.throughput * (1 - 1e-9)


def test_the_policy_drafts_less_as_the_batch_grows_and_its_price_rises() -> None:
    rows = rows_of(system())
    lengths, prices = [row.auto.num_draft_tokens for row in rows], [row.price for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]
    assert prices == sorted(prices)


@given(st.floats(0.05, 0.95), st.floats(0.01, 1.0), st.floats(10, 400))
def test_break_even_is_where_drafting_stops_paying(alpha: float, cost: float, ridge: float) -> None:
    measured = MeasuredSystem("m", StepCosts(1.0, 1 / ridge), DraftCosts(1e-9))
    planned = FixedDraftCost(measured, cost)
    question = Question((alpha, alpha**2), (1, 2))
    paying = paying_range(planned, question, 0)
    if paying is None:
        checks = [(1, False), (100, False)]
    elif paying.break_even is None:
        checks = [(1, True), (4096, True)]
    else:
        checks = [(paying.break_even - 1, True), (paying.break_even, False)]
    for batch, pays in checks:
        row = plan_row(planned, question, batch, 0)
        assert (row.best_fixed[1].throughput > row.off.throughput) == pays


def test_experts_make_a_small_batch_too_short_for_a_draft() -> None:
    hardware = PROFILES["h200"]
    planned = RooflineSystem(
        Replica(model_shape("30B-A3B"), hardware), Replica(model_shape("0.6B"), hardware)
    )
    question = Question((0.7, 0.49, 0.343), (1, 2, 3))
    paying = paying_range(planned, question, 1000)
    assert paying is not None
    assert paying.first > 1
    for batch in (paying.first - 1, paying.first):
        row = plan_row(planned, question, batch, 1000)
        assert (row.change(row.best_fixed[1]) > 0) == (batch == paying.first)
    text = explain(planned, question, [plan_row(planned, question, 64, 1000)])
    assert f"Drafting pays from batch {paying.first} to {(paying.break_even or 0) - 1}" in text
    assert "so short" in text
    assert is_two_sentences(text)


def is_two_sentences(text: str) -> bool:
    return text.count(". ") == 1 and text.endswith(".")


def measured(slope: float, one_pass: float) -> MeasuredSystem:
    return MeasuredSystem("m", StepCosts(0.01, slope, 1e-9), DraftCosts(pass_seconds=one_pass))


@pytest.mark.parametrize(
    ("planned", "says"),
    [
        (measured(1e-4, 1e-4), "Drafting pays below batch"),
        (measured(1e-4, 0.02), "Drafting pays at no batch"),
        (measured(1e-9, 1e-4), "Drafting pays at every batch up to 4096"),
        (system("70B", "1B"), "Drafting pays at every batch up to 224, where room in the KV cache ends"),
        (ON_L4, "the draft's weights and KV leave room for"),
    ],
    ids=["ridge", "nowhere", "everywhere", "up to full", "room"],
)
def test_two_sentences_say_where_it_stops_and_why(
    planned: MeasuredSystem | RooflineSystem, says: str
) -> None:
    context = 300 if planned is ON_L4 else 2000
    text = explain(planned, QUESTION, rows_of(planned, context))
    assert says in text
    assert is_two_sentences(text)


def test_lengths_that_survival_does_not_cover_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"9 is outside \[1, 8\]"):
        replace(QUESTION, fixed=(9,))


@pytest.mark.parametrize("contexts", [(2000,), (400, 2000)])
def test_a_picture_is_a_png(tmp_path: Path, contexts: tuple[int, ...]) -> None:
    rows = [plan_row(system(), QUESTION, batch, context) for context in contexts for batch in (1, 64)]
    path = tmp_path / "new" / "plan.png"
    draw(rows, "title", path, 30, 60)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_every_known_shape_is_found_by_its_name() -> None:
    assert all(isinstance(model_shape(shape.name), ModelShape) for shape in SHAPES.values())
