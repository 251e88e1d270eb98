"""Prompts of the benchmarks: copy-heavy ones, whose answers repeat what was given, and free-form chat.

Both lists are fixed: shuffled once with a fixed seed, so that any first few are of every sort.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from benchmarks.texts import CODE, PROSE, RECORDS

_PROSE_TASKS = (
    "Repeat the following text exactly, word for word:\n\n{}",
    "Correct spelling mistakes in the following text and write all of it out. Change nothing else.\n\n{}",
    "Copy this text and write the first sentence in capital letters, everything else unchanged:\n\n{}",
    "Split this text into a list with one sentence on each line, without changing the words:\n\n{}",
    'Quote the following passage in full, after the words "The passage reads:"\n\n{}',
)
_CODE_TASKS = (
    "Print this code again without any change:\n\n```\n{}```",
    "Add a comment above the first line of this code and write out the complete code:\n\n```\n{}```",
    "Fix the indentation of this code where needed. Answer with the whole code only.\n\n```\n{}```",
    "Add a last line with the comment END to this code, and write out the complete result:\n\n```\n{}```",
)
_RECORD_TASKS = (
    "Extract all entries from the following data as a JSON list, with every field:\n\n{}",
    "Write this data out again, with an empty line between the entries:\n\n{}",
    "Number the lines of this data, starting with 1, and keep everything else:\n\n{}",
    "Turn this data into CSV with a header line. Keep every value as it is.\n\n{}",
)
_CHAT_TASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Explain {} to a curious twelve-year-old.",
        ("why the sky is blue", "how vaccines work", "what inflation is", "how bees find flowers", "tides"),
    ),
    (
        "Write a short story about {}.",
        (
            "a lighthouse keeper who is afraid of the dark",
            "two robots that share one battery",
            "a letter that arrives forty years late",
            "the last library on Mars",
            "a baker who never sleeps",
        ),
    ),
    (
        "What are the advantages and disadvantages of {}?",
        ("working from home", "electric cars", "living in a big city", "nuclear power", "school uniforms"),
    ),
    (
        "Give me advice: {}",
        (
            "how do I sleep better?",
            "how do I prepare for a job interview?",
            "how do I learn to cook on a small budget?",
            "how do I make friends in a new town?",
            "how do I stop putting things off?",
        ),
    ),
    (
        "Plan {} and describe each step.",
        (
            "a weekend in Lisbon",
            "a birthday party for a six-year-old",
            "a small vegetable garden on a balcony",
            "a three-day hike for beginners",
            "a study schedule for a chemistry exam",
        ),
    ),
    (
        "Compare {}. Which would you choose, and why?",
        (
            "cats and dogs as pets",
            "trains and planes for a journey of 600 km",
            "paper books and e-readers",
            "Python and Java as a first programming language",
            "tea and coffee",
        ),
    ),
    (
        "Write a polite e-mail in which {}.",
        (
            "I ask my landlord to repair the heating",
            "I decline an invitation to a wedding",
            "I ask a professor for more time",
            "I complain about a late delivery",
            "I thank a colleague for her help",
        ),
    ),
    (
        "Describe {} in vivid detail.",
        (
            "a market in the early morning",
            "a thunderstorm over the sea",
            "an abandoned railway station",
            "a kitchen in which four people cook",
            "the first snow of the year",
        ),
    ),
    (
        "What happened in {}, and why does it matter today?",
        (
            "the Industrial Revolution",
            "the fall of the Berlin Wall",
            "the first Moon landing",
            "the invention of printing",
            "the building of the Suez Canal",
        ),
    ),
    (
        "Invent {} and tell me how it works.",
        (
            "a board game about gardening",
            "a machine that folds laundry",
            "a new sport for three teams",
            "a festival for a village by a lake",
            "a language for talking to dolphins",
        ),
    ),
    (
        "I have a question about science: {}",
        (
            "why do we dream?",
            "how do planes stay in the air?",
            "what is a black hole?",
            "why do leaves change colour?",
            "how does a refrigerator cool?",
        ),
    ),
    (
        "Write a dialogue between {}.",
        (
            "a teacher and a pupil who forgot his homework",
            "the Sun and the Moon",
            "two chess players in a park",
            "a detective and a parrot",
            "a farmer and a weather forecaster",
        ),
    ),
    (
        "Write a poem about {}.",
        ("the autumn wind", "a forgotten umbrella", "the smell of rain", "a night train", "old photographs"),
    ),
)


CODE_WANTED = (
    "Write a Python class for a bank account with deposits, withdrawals and a history of both.",
    "Write a Python script that renames all photos in a folder by the date on which they were taken.",
    "Write a JavaScript function that shows a countdown of ten seconds on a web page.",
    "Write a SQL query that finds the three customers with the largest orders of the last month.",
    "Write a Python generator that yields the lines of several log files in the order of their times.",
    "Write a shell script that makes a backup of a folder every night and keeps the last seven.",
    "Write a Java method that returns the shortest path between two stations of an underground map.",
    "Write a Python function that splits a bill between friends who ordered different things.",
    "Write an HTML page with a form for a newsletter and check the entry with JavaScript.",
    "Write a C function that reverses the order of the words in a sentence in place.",
    "Write unit tests in Python for a function that tells whether a year is a leap year.",
    "Write a Python program for the game of hangman with a list of ten words.",
    "Write a Rust function that reads a configuration file of lines like name = value into a map.",
    "Write a Python decorator that measures how long a function takes and prints it.",
    "Write a Go program that answers every HTTP request with the time of day.",
    "Write a Python function that turns a number of seconds into hours, minutes and seconds.",
)
"""Answers are new code: neither chat nor copies."""


class PromptKind(StrEnum):
    """What the answers are like."""

    COPY_HEAVY = "copy-heavy"
    FREE_FORM = "free-form"


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    kind: PromptKind
    text: str


def _filled(tasks: Iterable[str], parts: Iterable[str]) -> list[str]:
    return [task.format(part) for task, part in product(tasks, parts)]


def _shuffled(kind: PromptKind, texts: Sequence[str]) -> tuple[Prompt, ...]:
    order = list(texts)
    random.Random(0).shuffle(order)
    return tuple(Prompt(kind, text) for text in order)


COPY_HEAVY = _shuffled(
    PromptKind.COPY_HEAVY,
    [*_filled(_PROSE_TASKS, PROSE), *_filled(_CODE_TASKS, CODE), *_filled(_RECORD_TASKS, RECORDS)],
)
FREE_FORM = _shuffled(
    PromptKind.FREE_FORM, [text for task, topics in _CHAT_TASKS for text in _filled([task], topics)]
)


def prompts_of(kind: PromptKind, count: int, start: int = 0) -> list[Prompt]:
    """`count` prompts of a kind from the `start`-th on, beginning again after the last."""
    prompts = COPY_HEAVY if kind is PromptKind.COPY_HEAVY else FREE_FORM
    return [prompts[(start + index) % len(prompts)] for index in range(count)]
