"""Prompts whose answers a draft learns from: written ones, and tasks on texts that the target wrote.

A prompt is decided by (seed, index) alone. About one topic in sixteen is held out: nothing that names it is
ever trained on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specdecode.distill import topics

HELD_OUT_SHARE = 16
"""One topic, text or own prompt in this many is kept for the report."""


class PromptKind(StrEnum):
    """What an answer is like; the report has one line for each."""

    CHAT = "chat"
    OWN = "own"  # the target wrote the user's message too
    CODE = "code"
    DATA = "data"
    GIVEN_TEXT = "given-text"
    PLAIN = "plain"  # a text goes on, without a chat template
    LOGGED = "logged"  # the user's own prompts


@dataclass(frozen=True)
class Prompt:
    """One conversation up to the answer, or a text that goes on.

    Attributes:
        messages: (role, content) in order; empty for `PLAIN` and for `OWN`, whose words the target writes.
        text: what goes on, for `PLAIN`.
        temperature: at which the answer is sampled.
        held_out: kept for the report.
    """

    kind: PromptKind
    temperature: float
    held_out: bool
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a concise assistant. Answer briefly.",
    "You are a friendly teacher who explains things step by step.",
    "You are an expert programmer.",
    "You answer as a careful editor.",
)

_CHAT_FORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Explain {} in simple terms.", topics.SUBJECTS),
    ("What is the most important thing to know about {}?", topics.SUBJECTS),
    ("Write a short article about {}.", topics.SUBJECTS),
    ("Give me five interesting facts about {}.", topics.SUBJECTS),
    ("Can you summarize what is known about {} in one paragraph?", topics.SUBJECTS),
    ("Write three quiz questions about {} with answers.", topics.SUBJECTS),
    ("Why does {} matter?", topics.SUBJECTS),
    ("Tell me about the history of {}.", topics.SUBJECTS),
    ("What are common misconceptions about {}?", topics.SUBJECTS),
    ("I have to give a talk on {}. Write an outline.", topics.SUBJECTS),
    ("What are the pros and cons of spending time on {}?", topics.SUBJECTS),
    ("Write a blog post introduction about {}.", topics.SUBJECTS),
    ("Describe {} to someone who has never heard of it.", topics.SUBJECTS),
    ("Write a short story about {}.", topics.HEROES),
    ("Write a poem about {}.", topics.HEROES),
    ("Continue this story: Once upon a time there was {}.", topics.HEROES),
    ("Write a dialogue between {} and a stranger.", topics.HEROES),
    ("Invent a funny scene with {}.", topics.HEROES),
    ("How do I {}?", topics.GOALS),
    ("I want to {}. Give me a step-by-step plan.", topics.GOALS),
    ("What should I avoid when I {}?", topics.GOALS),
    ("Give me ten tips to {}.", topics.GOALS),
    ("Make a checklist for someone who wants to {}.", topics.GOALS),
    ("Write a polite e-mail in which {}.", topics.MAILS),
    ("Write a short, friendly message in which {}.", topics.MAILS),
    ("Draft a formal letter in which {}.", topics.MAILS),
    ("Compare {}.", topics.PAIRS),
    ("What is the difference between {}?", topics.PAIRS),
    ("Which is better: {}? Give reasons.", topics.PAIRS),
    ("Describe a day in {}.", topics.PLACES),
    ("Plan a three-day trip to {}.", topics.PLACES),
    ("Write a postcard from {}.", topics.PLACES),
    ("What would you pack for a visit to {}?", topics.PLACES),
)
_CODE_FORMS = (
    "Write a {language} function that {task}.",
    "Show me how to write code in {language} that {task}.",
    "Write a {language} program that {task}, with comments.",
    "Write {language} code that {task} and a test for it.",
    "Explain step by step how a {language} function that {task} works, with an example.",
)
_DATA_FORMS = (
    "Make a JSON list of {n} {things} with {fields}.",
    "Give me a table in Markdown of {n} {things} with {fields}.",
    "Write {n} lines of CSV about {things} with {fields}, with a header line.",
    "Write a YAML file that describes {n} {things} with {fields}.",
    "Make a numbered list of {n} {things} with {fields}.",
    "Write SQL that creates a table for {things} with {fields} and inserts {n} rows.",
)
_TEXT_FORMS = (
    "Summarize the following text in two sentences:\n\n{}",
    "Repeat the following text:\n\n{}",
    "Copy the text below without any changes.\n\n{}",
    "Correct the grammar of this text and return the full text:\n\n{}",
    "Rewrite this text in a more formal style:\n\n{}",
    "Make this text shorter:\n\n{}",
    "List the main points of this text:\n\n{}",
    "What is the following text about?\n\n{}",
    "Write the following text again with a title above it:\n\n{}",
    "Put each sentence of this text on a line of its own:\n\n{}",
    "Text:\n{}\n\nWrite three questions about the text and answer them.",
    "Extract the most important facts from this text as JSON:\n\n{}",
    "Translate this text into plain English for children:\n\n{}",
    "{}\n\nPlease add one more paragraph to the text above.",
)
_TEXT_CODE_FORMS = (
    "Explain this code:\n\n{}",
    "Add comments to this code and write all of it out:\n\n{}",
    "Rename the variables in this code so that they are easier to read:\n\n{}",
    "Write this code again without changes:\n\n{}",
    "Find mistakes in this code and fix them:\n\n{}",
    "Add error handling to this code:\n\n{}",
)
_TEXT_DATA_FORMS = (
    "Turn this data into JSON:\n\n{}",
    "Write this data as a Markdown table:\n\n{}",
    "Repeat this data line by line:\n\n{}",
    "Sort these entries by name and write them all out:\n\n{}",
    "Describe this data in two sentences:\n\n{}",
)

KIND_WEIGHTS: Mapping[PromptKind, float] = {
    PromptKind.CHAT: 0.42,
    PromptKind.OWN: 0.17,
    PromptKind.CODE: 0.11,
    PromptKind.DATA: 0.08,
    PromptKind.GIVEN_TEXT: 0.18,
    PromptKind.PLAIN: 0.04,
}
"""How often each kind is asked; the defaults of `specdecode distill`."""

TEMPERATURE_WEIGHTS: Mapping[float, float] = {0.0: 0.45, 0.7: 0.35, 1.0: 0.2}
"""Temperatures at which answers are sampled, and how often."""


def written_prompt(
    seed: int,
    index: int,
    texts: Mapping[PromptKind, Sequence[str]],
) -> Prompt:
    """The index-th prompt of a seed.

    Args:
        texts: answers of the target by the kind of what asked for them, which tasks on given texts are about;
            until there are any, such tasks are replaced by chat.
    """
    rng = random.Random(f"{seed}/{index}")
    kind = rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
    temperature = rng.choices(list(TEMPERATURE_WEIGHTS), list(TEMPERATURE_WEIGHTS.values()))[0]
    if kind in (PromptKind.GIVEN_TEXT, PromptKind.PLAIN) and not any(texts.values()):
        kind = PromptKind.CHAT
    if kind is PromptKind.OWN:
        return Prompt(kind, temperature, _held_out(f"own {seed}/{index}"))
    content, topic = _WRITERS[kind](rng, texts)
    if kind is PromptKind.PLAIN:
        return Prompt(kind, temperature, _held_out(topic), text=content)
    system = (("system", rng.choice(_SYSTEMS)),) if rng.random() < 0.1 else ()
    return Prompt(kind, temperature, _held_out(topic), (*system, ("user", content)))


def _held_out(topic: str) -> bool:
    return zlib.crc32(topic.encode()) % HELD_OUT_SHARE == 0


_Texts = Mapping[PromptKind, Sequence[str]]


def _chat(rng: random.Random, texts: _Texts) -> tuple[str, str]:
    form, filling = rng.choice(_CHAT_FORMS)
    topic = rng.choice(filling)
    if rng.random() < 0.06:
        numbers = {name: rng.randint(2, 60) for name in "abc"}
        form = rng.choice(topics.MATHS)
        return form.format(**numbers), f"{form} {numbers['a']}"
    return form.format(topic), topic


def _code(rng: random.Random, texts: _Texts) -> tuple[str, str]:
    task = rng.choice(topics.FUNCTIONS)
    return rng.choice(_CODE_FORMS).format(language=rng.choice(topics.LANGUAGES), task=task), task


def _data(rng: random.Random, texts: _Texts) -> tuple[str, str]:
    things = rng.choice(topics.THINGS)
    form = rng.choice(_DATA_FORMS)
    return form.format(n=rng.randint(3, 8), things=things, fields=rng.choice(topics.FIELDS)), things


def _given_text(rng: random.Random, texts: _Texts) -> tuple[str, str]:
    kind = rng.choice([kind for kind, found in texts.items() if found])
    forms = {PromptKind.CODE: _TEXT_CODE_FORMS, PromptKind.DATA: _TEXT_DATA_FORMS}.get(kind, _TEXT_FORMS)
    text = rng.choice(texts[kind])
    return rng.choice(forms).format(text), text


def _plain(rng: random.Random, texts: _Texts) -> tuple[str, str]:
    text = rng.choice(texts[rng.choice([kind for kind, found in texts.items() if found])])
    return text[: max(40, int(len(text) * rng.uniform(0.2, 0.6)))], text


_WRITERS: Mapping[PromptKind, Callable[[random.Random, _Texts], tuple[str, str]]] = {
    PromptKind.CHAT: _chat,
    PromptKind.CODE: _code,
    PromptKind.DATA: _data,
    PromptKind.GIVEN_TEXT: _given_text,
    PromptKind.PLAIN: _plain,
}
