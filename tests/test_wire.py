"""What is put on the wire comes off it unchanged, and what doesn't hang together is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from specdecode import errors, requests, types, wire
from specdecode import figures as measured
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.errors import InvalidArgumentError, Reason, SpecdecodeError
from specdecode.replicas import Replica, ReplicaRole, ReplicaState, Scale
from specdecode.v1 import draft_service_pb2 as draft_pb
from specdecode.v1 import replica_service_pb2 as replica_pb
from specdecode.v1 import router_service_pb2 as router_pb
from specdecode.v1 import target_service_pb2 as target_pb
from specdecode.v1 import types_pb2 as pb

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)
text = st.text(max_size=12)
methods = st.sampled_from(types.Method)
origins = st.sampled_from(types.Origin)
drafters = st.sampled_from(types.DrafterKind)


def tuples(element: st.SearchStrategy[Any], max_size: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(element, max_size=max_size).map(tuple)


token_ids = tuples(uint32)
times = st.builds(types.StepTimes, float32, float32, float32, float32)
sampling = st.builds(
    types.SamplingParams,
    repetition_penalty=float32,
    presence_penalty=float32,
    frequency_penalty=float32,
    logit_bias=tuples(st.tuples(uint32, float32)),
    allowed_token_ids=st.none() | token_ids,
    banned_token_ids=token_ids,
    temperature=float32,
    top_k=uint32,
    top_p=float32,
    min_p=float32,
    max_tokens=uint32,
    min_tokens=uint32,
    stop_token_ids=token_ids,
    logprobs=st.none() | uint32,
)
kinds = st.sampled_from(
    [
        errors.InvalidArgumentError,
        errors.NotFoundError,
        errors.FailedPreconditionError,
        errors.ResourceExhaustedError,
        errors.UnavailableError,
        errors.DeadlineExceededError,
        errors.CancelledError,
        errors.InternalError,
    ]
)
violations = tuples(st.builds(errors.FieldViolation, text, text))
seconds = st.none() | st.integers(0, 2**20).map(lambda count: count / 512)


def router_requests() -> st.SearchStrategy[requests.GenerateRequest]:
    options = st.builds(
        requests.SamplingOptions,
        *[st.none() | float32, st.none() | uint32] + [st.none() | float32] * 5,
        logit_bias=tuples(st.tuples(uint32, float32)),
        allowed_token_ids=st.none() | token_ids,
        banned_token_ids=token_ids,
        max_tokens=st.none() | uint32,
        min_tokens=st.none() | uint32,
        stop=tuples(text),
        stop_token_ids=token_ids,
        ignore_eos=st.booleans(),
        logprobs=st.none() | uint32,
        seed=st.none() | uint64,
    )
    calls = tuples(st.builds(requests.ToolCall, text, text, text))
    messages = st.builds(requests.ChatMessage, text, text, calls, text, text)
    prompts = (
        st.none()
        | st.builds(requests.TextPrompt, text)
        | st.builds(requests.ChatPrompt, tuples(messages), tuples(st.builds(requests.Tool, text, text, text)))
        | st.builds(requests.TokenPrompt, token_ids)
    )
    speculation = st.builds(
        requests.SpeculationOptions,
        st.sampled_from(requests.SpeculationMode),
        st.none() | uint32,
        st.none() | drafters,
        st.none() | methods,
        st.none() | float32,
        st.sampled_from(requests.Tier),
        text,
    )
    return st.builds(
        requests.GenerateRequest,
        prompts,
        options,
        speculation,
        st.none() | uint32,
        text,
        st.booleans(),
        st.binary(max_size=8),
        st.booleans(),
        st.none() | st.sampled_from(requests.TraceDetail),
        text,
    )


@st.composite
def specdecode_errors(draw: st.DrawFn) -> SpecdecodeError:
    reason = draw(st.sampled_from(Reason))
    kind = errors.NumericalError if reason is Reason.NUMERICAL_ERROR else draw(kinds)
    return kind(draw(text), reason=reason, violations=draw(violations), retry_after=draw(seconds))


@st.composite
def distributions(draw: st.DrawFn, num_drafted: int) -> types.SparseDistributions:
    sizes = draw(st.lists(st.integers(1, 4), min_size=num_drafted, max_size=num_drafted))
    exactly = {"min_size": sum(sizes), "max_size": sum(sizes)}
    return types.SparseDistributions(
        sizes=np.array(sizes, dtype=np.int32),
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), **exactly)), dtype=np.int32),
        probs=np.array(draw(st.lists(float32, **exactly)), dtype=np.float32),
    )


@st.composite
def committed(draw: st.DrawFn) -> dict[str, Any]:
    ids = draw(st.lists(uint32, min_size=1, max_size=6))
    return {"token_ids": tuple(ids), "num_prompt_tokens": draw(st.integers(1, len(ids)))}


@st.composite
def open_sequences(draw: st.DrawFn) -> types.OpenSequence:
    return types.OpenSequence(
        sequence=draw(uint64),
        **draw(committed()),
        sampling=draw(sampling),
        method=draw(methods),
        seed=draw(uint64),
        choice_index=draw(uint32),
        deadline=draw(st.none() | st.floats(allow_nan=False)),
        cache_salt=draw(st.binary(max_size=8)),
        traceparent=draw(text),
        trust_draft=draw(st.booleans()),
    )


@st.composite
def open_drafts(draw: st.DrawFn) -> types.OpenDraft:
    return types.OpenDraft(
        sequence=draw(uint64),
        **draw(committed()),
        sampling=draw(sampling),
        method=draw(methods),
        drafter=draw(drafters),
        seed=draw(uint64),
        choice_index=draw(uint32),
        traceparent=draw(text),
        cache_salt=draw(st.binary(max_size=8)),
    )


@st.composite
def verifies(draw: st.DrawFn) -> types.Verify:
    drafted = draw(token_ids)
    q = draw(st.none() | distributions(len(drafted)))
    return types.Verify(draw(uint64), draw(uint32), drafted, q, draw(uint64))


@st.composite
def drafts(draw: st.DrawFn) -> types.Draft:
    ids = draw(token_ids)
    q = draw(st.none() | distributions(len(ids)))
    return types.Draft(
        draw(uint64), draw(uint32), ids, q, draw(float32), draw(st.none() | specdecode_errors())
    )


logprobs = st.builds(types.TokenLogprobs, uint32, float32, uint32, tuples(st.tuples(uint32, float32)))


@st.composite
def step_results(draw: st.DrawFn) -> types.StepResult:
    ids = draw(token_ids)
    num_drafted = draw(st.integers(0, 32))
    tested = draw(tuples(st.tuples(float32, float32)))
    return types.StepResult(
        sequence=draw(uint64),
        committed_length=draw(uint32),
        token_ids=ids,
        origins=tuple(draw(origins) for _ in ids),
        num_drafted=num_drafted,
        num_accepted=draw(st.integers(0, num_drafted)),
        tested=tuple(pair[0] for pair in tested),
        passed=tuple(pair[1] for pair in tested),
        logprobs=draw(st.just(()) | st.tuples(*[logprobs for _ in ids])),
        lease_left=draw(uint32),
        times=draw(times),
        num_cached_tokens=draw(uint32),
        num_preemptions=draw(uint32),
        finish_reason=draw(st.none() | st.sampled_from(types.FinishReason)),
        error=draw(st.none() | specdecode_errors()),
    )


leases = st.builds(types.Lease, uint64, uint32, uint32, uint64)
loads = st.builds(
    types.LoadSnapshot,
    *(uint32, uint32, uint32, uint32, uint64, uint32, uint32, float32),
    *(uint32, uint32, uint32, float32, float32, float32, float32),
)
part_seconds = st.floats(0, 1e3)


@st.composite
def step_costs(draw: st.DrawFn) -> StepCosts:
    sizes = st.lists(st.integers(1, 10_000), max_size=4, unique=True).map(lambda found: tuple(sorted(found)))
    tokens = draw(sizes)
    return StepCosts(
        draw(st.floats(1e-6, 1e3)),
        *(draw(part_seconds) for _ in range(3)),
        prefill_share=draw(st.floats(0, 1)),
        tokens=tokens,
        seconds=tuple(sorted(draw(st.floats(1e-6, 1e3)) for _ in tokens)),
        buckets=draw(sizes),
        residual=draw(part_seconds),
        sequence_seconds=draw(part_seconds),
        attention_seconds=draw(part_seconds),
    )


draft_costs = st.builds(
    DraftCosts,
    st.floats(1e-6, 1e3),
    *[part_seconds] * 4,
    single_pass=st.booleans(),
    residual=part_seconds,
)
model_infos = st.builds(
    types.ModelInfo,
    name=text,
    fingerprint=text,
    vocab_size=uint32,
    max_length=uint32,
    dtype=text,
    device=text,
    eos_token_ids=token_ids,
    drafters=tuples(drafters),
    num_parameters=uint64,
    block_size=uint32,
    num_blocks=uint32,
    version=text,
)
replica_statuses = st.builds(
    requests.ReplicaStatus, text, st.booleans(), st.none() | model_infos, st.none() | loads, uint32
)
drafts_asked = st.integers(0, types.MAX_DRAFT_TOKENS)
proposes = st.builds(types.Propose, uint64, uint32, token_ids, drafts_asked, uint64)
usages = st.builds(types.Usage, *[uint32] * len(dataclasses.fields(types.Usage)))
round_records = st.builds(
    types.RoundRecord,
    index=uint32,
    num_drafted=uint32,
    num_accepted=uint32,
    num_emitted=uint32,
    last_origin=origins,
    drafter=st.none() | drafters,
    reason=text,
    seconds=float32,
    draft_seconds=float32,
    times=times,
    predicted_emitted=float32,
    predicted_seconds=float32,
    price=float32,
    tokens_in_flight=uint32,
)
float64 = st.floats(allow_nan=False)
float64s = tuples(float64)


@st.composite
def figures(draw: st.DrawFn) -> measured.Figures:
    """γ without rounds are not sent, so that the last one must have some."""
    depth = draw(st.integers(0, 4))
    runs = [tuple(draw(uint64) for _ in range(length + 1)) for length in range(depth)]
    if runs and not any(runs[-1]):
        runs[-1] = (1,) * depth
    positions = draw(tuples(st.tuples(float64, float64)))
    label = st.builds(measured.FigureLabel, text, text, st.none() | drafters, methods)
    return measured.Figures(
        draw(label),
        tuple(runs),
        *(draw(uint64) for _ in range(4)),
        tuple(pair[0] for pair in positions),
        tuple(pair[1] for pair in positions),
        draw(tuples(st.tuples(text, uint64))),
        *(draw(uint64) for _ in range(2)),
        *(draw(float64) for _ in range(4)),
        draw(st.builds(measured.Predictions, uint64, float64, float64, uint64, float64)),
        draw(st.builds(measured.Regret, uint64, float64, float64s)),
    )


policies = st.builds(
    requests.PolicyOptions,
    enabled=st.none() | st.booleans(),
    num_draft_tokens=st.none() | uint32,
    max_draft_tokens=st.none() | uint32,
    max_tokens_in_flight=st.none() | uint32,
    min_acceptance=st.none() | float64,
    min_acceptances=tuples(st.tuples(drafters, float64)),
    max_temperature=st.none() | float64,
    lease_seconds=st.none() | float64,
    batch_weight=st.none() | float64,
)
pieces = st.builds(
    requests.Piece,
    request_id=text,
    choice=uint32,
    text=text,
    tokens=tuples(st.builds(requests.EmittedToken, uint32, origins, st.none() | logprobs)),
    rounds=tuples(round_records, 2),
    finish_reason=st.none() | st.sampled_from(types.FinishReason),
    stop=st.none() | st.text(min_size=1, max_size=12),
    usage=st.none() | usages,
    error=st.none() | specdecode_errors(),
    report=tuples(figures(), 2),
    moves=tuples(st.builds(requests.Move, text, text, uint32), 2),
)

replicas = st.builds(
    Replica,
    id=st.text(min_size=1, max_size=8),
    role=st.sampled_from(ReplicaRole),
    state=st.sampled_from(ReplicaState),
    address=text,
    model=st.none() | model_infos,
    load=st.none() | loads,
    devices=text,
    detail=text,
)

MESSAGES: dict[str, tuple[st.SearchStrategy[Any], type[Message]]] = {
    "sampling": (sampling, pb.ResolvedSampling),
    "token_logprobs": (logprobs, pb.TokenLogprobs),
    "step_times": (times, pb.StepTimes),
    "load_snapshot": (loads, pb.LoadSnapshot),
    "step_costs": (step_costs(), pb.StepCosts),
    "draft_costs": (draft_costs, pb.DraftCosts),
    "model_info": (model_infos, pb.ModelInfo),
    "open_sequence": (open_sequences(), target_pb.OpenSequence),
    "verify": (verifies(), target_pb.Verify),
    "lease": (leases, target_pb.Lease),
    "decode_frame": (
        st.builds(
            types.DecodeFrame,
            tuples(open_sequences(), 2),
            tuples(verifies(), 2),
            tuples(leases, 2),
            tuples(uint64),
        ),
        target_pb.DecodeRequest,
    ),
    "step_result": (step_results(), target_pb.StepResult),
    "step_frame": (
        st.builds(types.StepFrame, uint64, loads, tuples(step_results(), 3), st.none() | step_costs()),
        target_pb.DecodeResponse,
    ),
    "open_draft": (open_drafts(), draft_pb.OpenDraft),
    "propose": (proposes, draft_pb.Propose),
    "draft_frame": (
        st.builds(types.DraftFrame, tuples(open_drafts(), 2), tuples(proposes, 3), tuples(uint64)),
        draft_pb.DraftRequest,
    ),
    "draft": (drafts(), draft_pb.ProposedDraft),
    "drafts_frame": (st.builds(types.DraftsFrame, tuples(drafts(), 3)), draft_pb.DraftResponse),
    "usage": (usages, router_pb.Usage),
    "round_record": (round_records, router_pb.RoundRecord),
    "piece": (pieces, router_pb.GenerateResponse),
    "figures": (figures(), router_pb.Figures),
    "policy": (policies, router_pb.Policy),
    "generate_request": (router_requests(), router_pb.GenerateRequest),
    "router_status": (
        st.builds(
            requests.RouterStatus,
            tuples(replica_statuses, 2),
            tuples(replica_statuses, 2),
            uint32,
            text,
        ),
        router_pb.GetStatusResponse,
    ),
    "replica": (replicas, replica_pb.Replica),
    "replicas": (tuples(replicas, 3), replica_pb.WatchReplicasResponse),
    "scale": (
        st.builds(Scale, st.none() | uint32, st.none() | uint32),
        replica_pb.ScaleReplicasRequest,
    ),
    "error": (specdecode_errors(), type(wire.error_to_proto(errors.InternalError("")))),
}


def parts(value: object) -> object:
    """A value that compares equal exactly when all parts do, arrays with their dtypes and errors included."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, SpecdecodeError):
        return type(value), vars(value)
    if dataclasses.is_dataclass(value):
        return type(value), [parts(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [parts(item) for item in value]
    return value


def test_every_message_is_covered_here() -> None:
    names = {name.removesuffix("_to_proto") for name in wire.__all__ if name.endswith("_to_proto")}
    nested = {"distributions", "drafter_costs", "sequence_error"}
    assert names - nested == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
@given(data=st.data())
def test_what_is_sent_arrives(name: str, data: st.DataObject) -> None:
    strategy, message_type = MESSAGES[name]
    value = data.draw(strategy)
    sent = getattr(wire, f"{name}_to_proto")(value).SerializeToString()
    arrived = getattr(wire, f"{name}_from_proto")(message_type.FromString(sent))
    assert parts(arrived) == parts(value)


@given(st.dictionaries(drafters, draft_costs))
def test_costs_arrive_under_their_drafters(costs: dict[types.DrafterKind, DraftCosts]) -> None:
    sent = draft_pb.GetDraftModelResponse(costs=wire.drafter_costs_to_proto(costs)).SerializeToString()
    arrived = draft_pb.GetDraftModelResponse.FromString(sent).costs
    assert wire.drafter_costs_from_proto(arrived) == costs


def test_costs_of_an_unknown_drafter_are_refused_by_name() -> None:
    message = draft_pb.DrafterCosts(drafter=99, costs=pb.DraftCosts(base_seconds=1))
    with pytest.raises(InvalidArgumentError, match=r"costs\[0\]\.drafter"):
        wire.drafter_costs_from_proto([message])


@pytest.mark.parametrize("name", ["decode_frame", "step_frame", "draft_frame", "drafts_frame", "error"])
@given(data=st.data())
def test_spoilt_bytes_are_refused_or_read_but_never_crash(name: str, data: st.DataObject) -> None:
    strategy, message_type = MESSAGES[name]
    sent = bytearray(getattr(wire, f"{name}_to_proto")(data.draw(strategy)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4)) if sent else 0):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = message_type.FromString(bytes(sent))
    except DecodeError:
        return
    # A refusal of what was spoilt is fine; any other exception fails the test.
    with contextlib.suppress(InvalidArgumentError):
        getattr(wire, f"{name}_from_proto")(message)


def open_with(**changes: Any) -> target_pb.OpenSequence:
    fields = {
        "token_ids": [1, 2],
        "num_prompt_tokens": 1,
        "sampling": pb.ResolvedSampling(),
        "method": pb.METHOD_BLOCK,
    }
    return target_pb.OpenSequence(**{**fields, **changes})


def open_draft_with(**changes: Any) -> draft_pb.OpenDraft:
    fields = {
        "token_ids": [1, 2],
        "num_prompt_tokens": 1,
        "sampling": pb.ResolvedSampling(),
        "method": pb.METHOD_COUPLED,
        "drafter": pb.DRAFTER_KIND_NGRAM,
    }
    return draft_pb.OpenDraft(**{**fields, **changes})


def verify_with(drafted: int, sizes: list[int], num_ids: int, num_probs: int) -> target_pb.Verify:
    q = pb.SparseDistributions(sizes=sizes, token_ids=bytes(4 * num_ids), probs=bytes(4 * num_probs))
    return target_pb.Verify(drafted=range(drafted), q=q)


def result_with(**fields: Any) -> target_pb.StepResult:
    return target_pb.StepResult(**fields)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (open_with(token_ids=[]), "opens[1].token_ids"),
        (open_with(num_prompt_tokens=0), "opens[1].num_prompt_tokens"),
        (open_with(num_prompt_tokens=3), "opens[1].num_prompt_tokens"),
        (open_with(sampling=None), "opens[1].sampling"),
        (open_with(method=pb.METHOD_UNSPECIFIED), "opens[1].method"),
        (open_with(method=99), "opens[1].method"),
        (verify_with(2, [1], 1, 1), "verifies[1].q.sizes"),
        (verify_with(1, [1, 1], 2, 2), "verifies[1].q.sizes"),
        (verify_with(2, [2, 0], 2, 2), "verifies[1].q.sizes"),
        (verify_with(2, [1, 2], 2, 3), "verifies[1].q.token_ids"),
        (verify_with(2, [1, 2], 3, 2), "verifies[1].q.probs"),
        (verify_with(1, [2**32 - 1], 1, 1), "verifies[1].q.token_ids"),
        (target_pb.Verify(drafted=range(33)), "verifies[1].drafted"),
        (
            target_pb.Verify(
                drafted=[1], q=pb.SparseDistributions(sizes=[1], token_ids=bytes(5), probs=bytes(4))
            ),
            "verifies[1].q.token_ids",
        ),
    ],
)
def test_malformed_decode_frames_are_refused_by_field(message: Any, field: str) -> None:
    good = {
        target_pb.OpenSequence: ("opens", open_with()),
        target_pb.Verify: ("verifies", verify_with(2, [1, 2], 3, 3)),
    }
    name, sound = good[type(message)]
    wire.decode_frame_from_proto(target_pb.DecodeRequest(**{name: [sound]}))
    with pytest.raises(InvalidArgumentError) as caught:
        wire.decode_frame_from_proto(target_pb.DecodeRequest(**{name: [sound, message]}))
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (result_with(token_ids=[1, 2], origins=[pb.ORIGIN_PLAIN]), "results[0].origins"),
        (result_with(token_ids=[1], origins=[pb.ORIGIN_UNSPECIFIED]), "results[0].origins"),
        (result_with(token_ids=[1], origins=[5]), "results[0].origins"),
        (
            result_with(token_ids=[1, 2], origins=[pb.ORIGIN_PLAIN] * 2, logprobs=[pb.TokenLogprobs()]),
            "results[0].logprobs",
        ),
        (result_with(tested=[1.0], passed=[]), "results[0].passed"),
        (result_with(num_drafted=1, num_accepted=2), "results[0].num_accepted"),
        (result_with(finish_reason=77), "results[0].finish_reason"),
    ],
)
def test_malformed_step_frames_are_refused_by_field(message: Any, field: str) -> None:
    frame = target_pb.DecodeResponse(load=pb.LoadSnapshot(), results=[message])
    with pytest.raises(InvalidArgumentError) as caught:
        wire.step_frame_from_proto(frame)
    assert caught.value.violations[0].field == field


def test_a_step_frame_without_load_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="load: missing"):
        wire.step_frame_from_proto(target_pb.DecodeResponse())


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (draft_pb.DraftRequest(opens=[open_draft_with(token_ids=[])]), "opens[0].token_ids"),
        (draft_pb.DraftRequest(opens=[open_draft_with(drafter=0)]), "opens[0].drafter"),
        (draft_pb.DraftRequest(opens=[open_draft_with(method=0)]), "opens[0].method"),
        (
            draft_pb.DraftRequest(proposes=[draft_pb.Propose(num_draft_tokens=33)]),
            "proposes[0].num_draft_tokens",
        ),
    ],
)
def test_malformed_draft_frames_are_refused_by_field(frame: draft_pb.DraftRequest, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        wire.draft_frame_from_proto(frame)
    assert caught.value.violations[0].field == field


def test_malformed_drafts_are_refused_by_field() -> None:
    q = pb.SparseDistributions(sizes=[2], token_ids=bytes(8), probs=bytes(4))
    with pytest.raises(InvalidArgumentError) as caught:
        wire.drafts_frame_from_proto(
            draft_pb.DraftResponse(drafts=[draft_pb.ProposedDraft(token_ids=[1], q=q)])
        )
    assert caught.value.violations[0].field == "drafts[0].q.probs"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stop": [""] * (requests.MAX_STOPS + 1)}, "sampling.stop"),
        ({"stop_token_ids": [5] * (requests.MAX_STOP_TOKEN_IDS + 1)}, "sampling.stop_token_ids"),
        ({"logit_bias": [pb.LogitBias(token_id=5)] * (requests.MAX_LOGIT_BIASES + 1)}, "sampling.logit_bias"),
        ({"banned_token_ids": [5] * (requests.MAX_LISTED_TOKEN_IDS + 1)}, "sampling.banned_token_ids"),
        (
            {"allowed_token_ids": pb.TokenIds(ids=[5] * (requests.MAX_LISTED_TOKEN_IDS + 1))},
            "sampling.allowed_token_ids",
        ),
    ],
)
def test_lists_that_are_too_long_are_not_even_read(options: dict[str, Any], field: str) -> None:
    message = router_pb.GenerateRequest(sampling=router_pb.SamplingOptions(**options))
    with pytest.raises(InvalidArgumentError) as caught:
        wire.generate_request_from_proto(message)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_q_is_little_endian_whatever_it_is_kept_as() -> None:
    q = types.SparseDistributions(
        sizes=np.array([1], dtype=np.int32),
        token_ids=np.array([258], dtype=">i4"),  # type: ignore[arg-type]
        probs=np.array([0.5], dtype=">f4"),  # type: ignore[arg-type]
    )
    message = wire.distributions_to_proto(q)
    assert message.token_ids == b"\x02\x01\x00\x00"
    assert message.probs == b"\x00\x00\x00\x3f"


class TestErrors:
    def test_status_of_a_refused_field(self) -> None:
        status = wire.error_to_proto(InvalidArgumentError.of("sampling.top_p", "2; above 0, at most 1"))
        assert (status.code, status.message) == (3, "sampling.top_p: 2; above 0, at most 1")
        assert [detail.type_url.rpartition("/")[2] for detail in status.details] == [
            "google.rpc.ErrorInfo",
            "google.rpc.BadRequest",
        ]

    def test_unknown_codes_and_reasons_are_internal(self) -> None:
        status = wire.error_to_proto(errors.UnavailableError("x"))
        status.code = 15
        status.details[0].value = status.details[0].value.replace(b"NO_REPLICA", b"SOMETHINGX")
        error = wire.error_from_proto(status)
        assert type(error) is errors.InternalError
        assert error.reason is Reason.ENGINE_FAILED

    def test_another_domains_reason_is_not_ours(self) -> None:
        status = wire.error_to_proto(errors.UnavailableError("x", reason=Reason.DRAINING))
        status.details[0].value = status.details[0].value.replace(b"specdecode", b"elsewhere!")
        assert wire.error_from_proto(status).reason is Reason.NO_REPLICA

    def test_long_texts_are_cut_between_characters(self) -> None:
        status = wire.error_to_proto(errors.InternalError("☃" * 1000))
        assert len(status.message.encode()) <= 768
        assert status.message == "☃" * 255 + "..."
