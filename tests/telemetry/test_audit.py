"""What a target said is confirmed, whatever was drafted; a token that it did not say is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specdecode.audit import audit
from specdecode.errors import InvalidArgumentError
from specdecode.lm.runner import PagedLM
from specdecode.records import RecordedTokens, RequestRecord, read_records
from specdecode.types import Method
from specdecode.v1 import router_service_pb2 as pb
from tests.cli.running import run
from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import Services

REQUESTS = [
    speculating(request_for(temperature=0, max_tokens=40), 4, MODEL),
    speculating(
        request_for(temperature=0, max_tokens=30, repetition_penalty=1.3, min_tokens=20, ignore_eos=True),
        *(3, NGRAM),
    ),
    speculating(request_for(seed=2**64 - 3, temperature=0.8, top_k=20, max_tokens=150), 3, MODEL),
    speculating(request_for(seed=9, top_p=0.9, presence_penalty=0.5, max_tokens=30), 0, NGRAM),
    speculating(request_for(max_tokens=10), 3, MODEL),
]


@pytest.fixture
async def records(model: Path, other_model: Path, tmp_path: Path) -> tuple[PagedLM, Path]:
    """The target that served, and its records: of each request above, the third with two choices."""
    path = tmp_path / "requests.jsonl"
    settings = {"record_path": str(path), "record_tokens": True}
    async with Services.started(model, other_model, **settings) as services:
        for index, request in enumerate(REQUESTS):
            own = pb.GenerateRequest()
            own.CopyFrom(request)
            own.n = 2 if index == 2 else 1
            await services.generate(own)
        return services.target.replica.engine.lm, path


def tokens_of(record: RequestRecord) -> RecordedTokens:
    assert record.tokens is not None
    return record.tokens


def test_every_token_is_the_targets_own(records: tuple[PagedLM, Path]) -> None:
    lm, path = records
    audited = [record for record in read_records([path]) if record.method != "rejection"]
    assert len(audited) == 4
    for record in audited:
        found = audit(lm, Method(record.method), tokens_of(record))
        assert (found.num_tokens, found.num_violations) == (record.num_emitted, 0)
        assert found.closest is not None
        assert found.closest >= 0


def test_a_token_that_is_not_the_targets_is_found_where_it_is(records: tuple[PagedLM, Path]) -> None:
    lm, path = records
    for record in read_records([path]):
        if record.method == "rejection":
            continue
        told = tokens_of(record)
        choice = told.choices[-1]
        at = len(choice.token_ids) // 2
        other = (choice.token_ids[at] + 1) % 200
        wrong = (*choice.token_ids[:at], other, *choice.token_ids[at + 1 :])
        changed = replace(told, choices=(*told.choices[:-1], replace(choice, token_ids=wrong)))
        found = audit(lm, Method(record.method), changed)
        first = next(finding for finding in found.findings if not finding.is_tie)
        assert (first.choice, first.position) == (len(told.choices) - 1, at)
        assert (first.emitted, first.expected) == (other, choice.token_ids[at])
        assert first.margin > 0


def test_another_seed_is_noticed(records: tuple[PagedLM, Path]) -> None:
    lm, path = records
    seeded = [record for record in read_records([path]) if record.method == "coupled"]
    for record in seeded:
        told = tokens_of(record)
        assert audit(lm, Method.COUPLED, replace(told, seed=told.seed - 1)).num_violations > 0


def test_what_can_not_be_audited_is_refused(records: tuple[PagedLM, Path]) -> None:
    lm, path = records
    told = tokens_of(next(read_records([path])))
    with pytest.raises(InvalidArgumentError, match="method: rejection"):
        audit(lm, Method.REJECTION, told)
    with pytest.raises(InvalidArgumentError, match="tokens: 300"):
        audit(lm, Method.GREEDY, replace(told, prompt=(5,) * (300 - len(told.choices[0].token_ids))))
    with pytest.raises(InvalidArgumentError, match="id 9999"):
        audit(lm, Method.GREEDY, replace(told, prompt=(9999,)))


@pytest.mark.timeout(240)
def test_the_command_says_so_and_fails_where_one_is_not(
    records: tuple[PagedLM, Path], tmp_path: Path
) -> None:
    _, path = records
    confirmed = run("audit", str(path), "--json")
    assert confirmed.returncode == 0, confirmed.stderr
    assert len(json.loads(confirmed.stdout)["requests"]) == 4
    lines = path.read_text().splitlines()
    record = json.loads(lines[0])
    record["tokens"]["choices"][0]["token_ids"][3] ^= 1
    changed = tmp_path / "changed.jsonl"
    changed.write_text(json.dumps(record) + "\n")
    failed = run("audit", str(changed), "--limit", "1")
    assert failed.returncode == 1
    assert "not the target's" in failed.stdout
