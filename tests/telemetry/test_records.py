"""Records of requests say what clients were told, rotate, and are read again."""

from __future__ import annotations

import csv
import io
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

import router.__main__ as router_main
from specdecode.config import RouterSettings
from specdecode.errors import InvalidArgumentError
from specdecode.records import RequestRecord, read_records
from specdecode.serving import configure_logging
from specdecode.types import Usage
from tests.cli.running import run
from tests.router.client import MODEL, NGRAM, PROMPT, request_for, speculating
from tests.services import Answer, Services
from tests.telemetry.collector import collector
from tests.telemetry.traced import PARENT


async def recorded(model: Path, draft: Path, path: Path, **router: Any) -> tuple[list[Answer], list[Any]]:
    """Answers to a few requests, and what was recorded of them."""
    requests = [
        speculating(request_for(temperature=0, max_tokens=40, ignore_eos=True), 4, MODEL),
        speculating(request_for(seed=5, temperature=0.7, max_tokens=20, ignore_eos=True), 3, NGRAM),
        speculating(request_for(temperature=1.0, max_tokens=10, ignore_eos=True), 0, NGRAM),
    ]
    requests[0].speculation.traffic_class = "first"
    async with Services.started(model, draft, record_path=str(path), **router) as services:
        answers = [await services.generate_one(request) for request in requests]
    return answers, list(read_records([path]))


async def test_a_record_says_what_the_client_was_told(model: Path, other_model: Path, tmp_path: Path) -> None:
    answers, records = await recorded(model, other_model, tmp_path / "logs" / "requests.jsonl")
    assert len(records) == 3
    for answer, record in zip(answers, records, strict=True):
        usage = answer.usage
        assert usage is not None
        for name in (
            "num_emitted",
            "num_rounds",
            "num_drafted",
            "num_accepted",
            "num_bonus",
            "num_recovered",
            "num_prompt_tokens",
            "num_failovers",
        ):
            assert getattr(record, name) == getattr(usage, name), name
        assert sum(map(sum, record.runs)) == usage.num_rounds == sum(record.reasons.values())
        assert record.id == answer.pieces[0].request_id
        assert 0 < record.first_token_seconds <= record.seconds  # type: ignore[operator]
        # The first result, of one leased token or several, took in the prompt.
        assert 0 < record.drafted.num_tokens + record.plain.num_tokens < usage.num_emitted
        assert record.drafted.seconds >= record.drafted.draft
    first, second, third = records
    assert (first.traffic_class, first.method, first.drafters) == ("first", "greedy", ("model",))
    assert first.acceptance == first.num_accepted / (first.num_accepted + first.num_recovered)
    assert (second.method, third.drafters, third.acceptance) == ("coupled", (), None)
    assert (third.speedup_theoretical, third.fallback_triggered) == (None, False)
    assert {record.outcome for record in records} == {"finished"}


async def test_no_text_is_recorded_unless_it_is_asked_for(
    model: Path, other_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plain.jsonl"
    _, records = await recorded(model, other_model, path)
    assert all(record.tokens is None for record in records)
    assert "fox" not in path.read_text()
    assert "token_ids" not in path.read_text()
    path = tmp_path / "tokens.jsonl"
    answers, records = await recorded(model, other_model, path, record_tokens=True)
    for answer, record in zip(answers, records, strict=True):
        assert record.tokens is not None
        assert [list(choice.token_ids) for choice in record.tokens.choices] == [answer.ids]
        assert record.tokens.sampling.max_tokens == len(answer.ids)
    assert records[1].tokens.seed == 5  # type: ignore[union-attr]


async def test_files_rotate_and_the_oldest_goes(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    settings = {"record_path": str(path), "record_bytes": 2048, "record_files": 3}
    async with Services.started(model, **settings) as services:
        for _ in range(12):
            await services.generate_one(speculating(request_for(temperature=0, max_tokens=1), 0, NGRAM))
    check_rotated(tmp_path)


def check_rotated(directory: Path) -> None:
    kept = sorted(directory.iterdir())
    assert [each.name for each in kept] == ["requests.jsonl", "requests.jsonl.1", "requests.jsonl.2"]
    assert all(each.stat().st_size <= 2048 for each in kept)
    assert 0 < len(list(read_records(kept))) < 12


async def test_a_request_that_was_taken_back_is_recorded_as_such(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with collector() as spans:
        settings = {"record_path": str(path), "otlp_endpoint": spans.address}
        async with Services.started(model, **settings) as services:
            request = request_for(max_tokens=200, ignore_eos=True)
            call = services.router.stub.Generate(request, metadata=[("traceparent", PARENT)])
            await call.read()
            call.cancel()
            await services.all_is_free()
            with pytest.raises(grpc.aio.AioRpcError):
                await services.generate(request_for(temperature=9))
    (record,) = read_records([path])
    assert (record.outcome, record.error) == ("cancelled", None)
    assert record.trace_id == PARENT.split("-")[1]


async def test_a_file_that_can_not_be_written_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = RouterSettings(model=str(model), record_path=str(tmp_path / "file" / "requests.jsonl"))
    with pytest.raises(InvalidArgumentError, match="record_path"):
        await router_main.start(settings)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"id": 1}'])
def test_a_line_that_is_no_record_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(InvalidArgumentError, match=r"requests\.jsonl:2"):
        list(read_records([path]))


@pytest.mark.timeout(300)
async def test_stats_are_those_of_the_records(model: Path, other_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    _, records = await recorded(model, other_model, path)
    ended = run("stats", str(path), str(path), "--by", "temperature", "--format", "csv")
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.DictReader(io.StringIO(ended.stdout)))
    assert [row["group"] for row in rows] == ["0", "0.5-0.9", "0.9-1.2"]
    by_bucket = dict(zip(("0", "0.5-0.9", "0.9-1.2"), records, strict=True))
    for row in rows:
        record = by_bucket[row["group"]]
        assert (row["requests"], row["tokens"]) == ("2", str(2 * record.num_emitted))
        assert row["acceptance_p50"] == ("" if record.acceptance is None else str(record.acceptance))
        assert float(row["fallback_rate"]) == record.fallback_triggered
    picture = tmp_path / "stats.png"
    shown = run("stats", str(path), "--by", "traffic_class", "--png", str(picture))
    assert shown.returncode == 0, shown.stderr
    assert "first" in shown.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    refused = run("stats", str(path), "--by", "runs")
    assert refused.returncode == 1
    assert "--by: 'runs'" in refused.stderr


async def test_one_line_a_request_is_logged_with_its_trace(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with collector() as spans:
        async with Services.started(model, otlp_endpoint=spans.address) as services:
            before = logging.getLogger().handlers[:], logging.getLogger().level
            try:
                configure_logging("router", "info", "json")
                answer = await services.generate_one(request_for(temperature=0, max_tokens=5))
            finally:
                logging.getLogger().handlers[:] = before[0]
                logging.getLogger().setLevel(before[1])
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    (told,) = [line for line in lines if line["message"].startswith("request ")]
    assert (told["service"], told["level"]) == ("router", "info")
    assert told["request_id"] == answer.pieces[0].request_id
    assert told["trace_id"] == spans.requests[0].trace_id
    assert told["emitted"] == (answer.usage or Usage()).num_emitted
    assert PROMPT not in json.dumps(lines)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = RequestRecord(
        *("id", "", 1.0, "m", "", "greedy", 0.5, 'a "class"\n', "auto", "batch", "failed", "DEADLINE")
    )
    path = tmp_path / "requests.jsonl"
    path.write_text(record.to_line() + "\n")
    assert list(read_records([path])) == [record]
