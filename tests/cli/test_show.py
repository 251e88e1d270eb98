"""What is printed, on a terminal and elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from specdecode.cli import show
from specdecode.errors import FieldViolation, InvalidArgumentError, ResourceExhaustedError
from specdecode.requests import ReplicaStatus, RouterStatus
from specdecode.types import (
    DrafterKind,
    LoadSnapshot,
    ModelInfo,
    Origin,
    RoundRecord,
    StepTimes,
    Usage,
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("a\rb\x08\x9b1m\x7f", "a\\x0db\\x08\\x9b1m\\x7f"),
        ("é世界🙂", "é世界🙂"),
    ],
)
def test_a_model_can_not_control_the_terminal(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    show.write(text)
    monkeypatch.setattr("sys.stdout", pipe)
    show.write(text)
    assert terminal.getvalue() == shown
    assert pipe.getvalue() == text


def rendered(rounds: list[RoundRecord], width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(show.rounds_table(rounds))
    assert isinstance(console.file, io.StringIO)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def record(
    index: int,
    num_drafted: int = 0,
    num_accepted: int = 0,
    reason: str = "speculating",
    predicted: float = 0.0,
) -> RoundRecord:
    origin = Origin.PLAIN if not num_drafted else Origin.RECOVERED
    drafter = DrafterKind.MODEL if num_drafted else None
    times = StepTimes(step=0.002)
    own = (index, num_drafted, num_accepted, num_accepted + 1, origin, drafter, reason, 0.003, 0.001, times)
    return RoundRecord(*own, predicted_emitted=predicted, predicted_seconds=0.004 * (predicted > 0))


def test_rounds_without_drafts_share_a_row_while_the_reason_is_the_same() -> None:
    rounds = [
        record(0, reason="first_token"),
        record(1, reason="draft_empty"),
        record(2, reason="draft_empty"),
        record(3, 4, 2, predicted=2.756),
        record(4, 4, 0),
        record(5, reason="draft_empty"),
    ]
    rows = [line.split() for line in rendered(rounds)[2:]]
    assert rows == [
        ["0", "-", "-", "plain", "-", "3.0", "-", "2.0", "first", "token"],
        ["1-2", "-", "-", "2", "plain", "-", "6.0", "-", "4.0", "draft", "empty"],
        ["3", "4", "2", "recovered", "2.8", "3.0", "1.0", "2.0", "model"],
        ["4", "4", "0", "recovered", "-", "3.0", "1.0", "2.0", "model"],
        ["5", "-", "-", "plain", "-", "3.0", "-", "2.0", "draft", "empty"],
    ]


def test_rounds_fit_into_80_columns() -> None:
    rounds = [record(index, reason="drafter_unavailable") for index in range(100)] + [
        record(100, 32, 31, predicted=32.5)
    ]
    assert len(rendered(rounds)) == 4


def test_status_keeps_every_word_in_80_columns() -> None:
    name = "smollm2-135m-instruct"
    info = ModelInfo(name, "f", 10, 2048, "bfloat16", "cpu", num_blocks=8192)
    drafts = replace(info, drafters=(DrafterKind.NGRAM, DrafterKind.MODEL))
    load = LoadSnapshot(num_running=64, num_waiting=128, num_free_blocks=8000, num_blocks=8192)
    status = RouterStatus(
        (ReplicaStatus("127.0.0.1:50052", True, info, load, 64),),
        (ReplicaStatus("127.0.0.1:50053", True, drafts, None, 64),),
        64,
        "0.1.0",
    )
    console = Console(width=80, file=io.StringIO(), color_system=None)
    for table in show.status_tables(status):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    for word in ("127.0.0.1:50052", "127.0.0.1:50053", name, "bfloat16 cpu", "8000/8192", "ngram, model"):
        assert word in shown


def test_a_complaint_names_what_its_message_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    violations = (FieldViolation("sampling.top_p", "too large"), FieldViolation("n", "too small"))
    show.complain(InvalidArgumentError("sampling.top_p: too large", violations=violations))
    show.complain(ResourceExhaustedError("the queue is full", retry_after=1.5))
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "error: sampling.top_p: too large",
        "  n: too small",
        "error: the queue is full",
        "  trying again may help after 1.5 s",
    ]


def test_the_summary_counts() -> None:
    usage = Usage(num_emitted=30, num_rounds=10, num_drafted=40, num_accepted=20)
    assert show.summary(usage, 2.0, "ended by length") == (
        "30 tokens in 10 rounds · 20 of 40 drafts accepted (50%) · 15.0 tok/s · ended by length"
    )
    assert show.summary(Usage(num_emitted=1, num_rounds=1), 1.0).startswith(
        "1 tokens in 1 rounds · 0 of 0 drafts"
    )
