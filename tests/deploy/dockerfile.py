"""A Dockerfile as its stages and instructions: as much of the format as ours uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        """Arguments of all instructions of a kind, in order."""
        return [argument for found, argument in self.instructions if found == word]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(word, argument) of each, with continued lines put together and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, argument = line.partition(" ")
            yield word, argument.strip()


def stages(path: Path) -> dict[str, Stage]:
    """Stages by name."""
    found: dict[str, Stage] = {}
    stage = Stage("", "")
    for word, argument in instructions(path.read_text(encoding="utf-8")):
        if word == "FROM":
            base, _, name = argument.split()
            stage = found[name] = Stage(name, base)
        else:
            stage.instructions.append((word, argument))
    return found


def lineage(found: dict[str, Stage], name: str) -> list[Stage]:
    """A stage after those it is built from."""
    stage = found[name]
    return [*(lineage(found, stage.base) if stage.base in found else ()), stage]
