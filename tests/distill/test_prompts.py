"""Which prompts are asked, and which are held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prompts import COPY_HEAVY, FREE_FORM
from specdecode.distill import topics
from specdecode.distill.prompts import Prompt, PromptKind, written_prompt
from specdecode.distill.prompts_file import read_prompts
from specdecode.errors import InvalidArgumentError

TEXTS = {
    PromptKind.CHAT: ["A river is long. It ends in the sea."],
    PromptKind.CODE: ["def one():\n    return 1"],
}
MANY = [written_prompt(3, index, TEXTS) for index in range(3000)]


def test_no_prompt_of_the_benchmarks_is_trained_on() -> None:
    contents = {content for prompt in MANY for _, content in prompt.messages}
    for known in (*FREE_FORM, *COPY_HEAVY):
        assert known.text not in contents
    fillings = {
        text.lower()
        for name in ("SUBJECTS", "HEROES", "GOALS", "MAILS", "PAIRS")
        for text in getattr(topics, name)
    }
    asked = [prompt.text.lower().rstrip("?.! ") for prompt in FREE_FORM]
    assert not [text for text in asked if any(text.endswith(f" {filling}") for filling in fillings)]


def test_a_prompt_is_decided_by_seed_and_index() -> None:
    assert [written_prompt(3, index, TEXTS) for index in range(3000)] == MANY
    assert [written_prompt(4, index, TEXTS) for index in range(3000)] != MANY


def test_a_topic_is_held_out_everywhere_or_nowhere() -> None:
    held = {prompt.messages[-1][1] for prompt in MANY if prompt.held_out and prompt.messages}
    trained = {prompt.messages[-1][1] for prompt in MANY if not prompt.held_out and prompt.messages}
    assert not held & trained
    for topic in topics.SUBJECTS:
        sides = {
            prompt.held_out
            for prompt in MANY
            for _, content in prompt.messages
            if content == f"Explain {topic} in simple terms."
        }
        assert len(sides) < 2
    assert 0.02 < sum(prompt.held_out for prompt in MANY) / len(MANY) < 0.15


def test_every_kind_is_asked_at_every_temperature() -> None:
    asked = {(prompt.kind, prompt.temperature) for prompt in MANY}
    kinds = set(PromptKind) - {PromptKind.LOGGED}
    assert asked == {(kind, temperature) for kind in kinds for temperature in (0.0, 0.7, 1.0)}


def test_without_texts_no_task_is_about_one() -> None:
    kinds = {written_prompt(0, index, {}).kind for index in range(500)}
    assert kinds == {PromptKind.CHAT, PromptKind.OWN, PromptKind.CODE, PromptKind.DATA}


def test_a_file_of_prompts_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = [
        {"messages": talk, "temperature": 0.3, "model": "m"},
        {"prompt": "Once"},
        {"messages": [{"role": "user", "content": ["a picture"]}]},
        {"prompt": " "},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\nnot JSON\n")
    found = read_prompts(path, "--data")
    assert [(p.kind, p.temperature, p.messages, p.text) for p in found] == [
        (PromptKind.LOGGED, 0.3, (("user", "hi"),), ""),
        (PromptKind.LOGGED, 0.7, (), "Once"),
    ]
    assert sum(prompt.held_out for prompt in found) == 1


def test_equal_prompts_are_held_out_together(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"number {i % 40}"}) for i in range(120)))
    by_text: dict[str, set[bool]] = {}
    for prompt in read_prompts(path, "--data"):
        by_text.setdefault(prompt.text, set()).add(prompt.held_out)
    assert all(len(sides) == 1 for sides in by_text.values())
    assert sum(sides == {True} for sides in by_text.values()) == 3


def test_a_file_that_is_not_there_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--from-log.*can't be read"):
        read_prompts(tmp_path / "nothing", "--from-log")


def test_an_own_prompt_has_no_words_yet() -> None:
    assert all(
        prompt == Prompt(PromptKind.OWN, prompt.temperature, prompt.held_out)
        for prompt in MANY
        if prompt.kind is PromptKind.OWN
    )
