"""The card of a trained draft, and its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdecode.distill.artifact import CARD_NAME

CURVES_NAME = "training.png"


def write_curves(directory: Path, curve: Sequence[Sequence[float]], recorded: Mapping[str, Any]) -> bool:
    """Writes loss, α and greedy agreement over steps as a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [line[0] for line in curve]
    left.plot(steps, [line[1] for line in curve], "C3-")
    left.set(xlabel="step", ylabel=f"loss ({recorded['training']['loss']})")
    right.plot(steps, [line[2] for line in curve], "C0-", label="α at temperature 1")
    right.plot(steps, [line[3] for line in curve], "C2-", label="greedy agreement")
    right.set(xlabel="step", ylim=(0, None))
    right.legend()
    figure.savefig(directory / CURVES_NAME, dpi=90)
    return True


def write_card(directory: Path, recorded: Mapping[str, Any]) -> None:
    """Writes the model card."""
    (directory / CARD_NAME).write_text(card(recorded), encoding="utf-8")


def card(recorded: Mapping[str, Any]) -> str:
    """The model card, Markdown."""
    target, student, corpus = recorded["target"], recorded["student"], recorded["corpus"]
    training, metrics = recorded["training"], recorded["metrics"]
    source = "fresh layers" if student["fresh"] else f"layers {', '.join(map(str, student['layers']))}"
    lines = [
        f"# A draft for {target['name']}",
        "",
        f"Made by `specdecode distill` from {source} of {target['name']} (weights SHA-256 "
        f"`{target['weights_sha256']}`). It proposes tokens for speculative decoding, which the target "
        "verifies; on its own it writes badly.",
        "",
        _licence_line(recorded),
        "",
        "```",
        str(recorded["command"]),
        "```",
        "",
        "## What it is",
        "",
        f"- {len(student['layers'])} layers; {student['trained_parameters']:,} trained parameters; "
        "embeddings are the target's.",
        _vocabulary_line(student),
        "",
        "## Data",
        "",
        f"- {corpus['texts']:,} answers of the target, {corpus['answer_tokens']:,} tokens, to prompts "
        f"({corpus['prompts']}); seed {corpus['seed']}. About one in sixteen was held out.",
        "- At each token the target's whole distribution, from its final hidden state.",
        f"- Passes over {', '.join(map(str, corpus['shards_by_pass']))} shards of "
        f"{corpus['shard_size']} texts.",
        "",
        "## Training",
        "",
        f"- Loss {training['loss']}, {training['steps']:,} steps of {training['num_positions']:,} positions, "
        f"{training['epochs']} passes, {training['optimiser']}, learning rate "
        f"{training['learning_rate']:g}, seed {training['seed']}.",
        "",
        f"![curves]({CURVES_NAME})",
        "",
        *_history(recorded),
        *_held_out(metrics),
    ]
    return "\n".join(lines)


def _held_out(metrics: Mapping[str, Any]) -> list[str]:
    return [
        "## Held-out prompts",
        "",
        "α = Σ min(p, q) at the text's own temperature and at 1, greedy agreement, and mean tokens emitted",
        f"per greedy round of γ = 4, over {metrics['held_out_texts']} answers:",
        "",
        "| prompts | positions | α | α at 1 | agreement | emitted per round | agreement at 0, 1, … |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, figures) for name, figures in metrics["teacher_forced"].items()),
        "",
        "α by draft position, the draft feeding on its own samples:",
        "",
        *(
            f"- {name}: {', '.join(f'{alpha:.3f}' for alpha in alphas)}"
            for name, alphas in metrics["self_fed_alpha_by_position"].items()
        ),
        "",
    ]


def _licence_line(recorded: Mapping[str, Any]) -> str:
    if "license" in recorded:
        return f"Licence: {recorded['license']}, as the base model."
    return "The base model's licence holds for this one too."


def _history(recorded: Mapping[str, Any]) -> list[str]:
    """What else happened in a run, where someone wrote it down."""
    notes = [f"- {note}" for note in recorded.get("history", ())]
    return ["This run in particular:", "", *notes, ""] if notes else []


def _vocabulary_line(student: Mapping[str, Any]) -> str:
    head = "trained" if student["head_trained"] else "the target's"
    if student["vocabulary"] is None:
        return f"- It may propose every id; its head is {head}."
    return (
        f"- It may propose the {student['vocabulary']:,} ids in `draft_vocabulary.json`, whose rows of the "
        f"head are {head}; other rows are the target's and are there for tools that expect a whole head."
    )


def _row(name: str, figures: Mapping[str, Any]) -> str:
    by_position = ", ".join(f"{value:.2f}" for value in figures["greedy_agreement_by_position"])
    return (
        f"| {name} | {figures['positions']} | {figures['alpha']:.3f} | {figures['alpha_temperature_1']:.3f} "
        f"| {figures['greedy_agreement']:.3f} | {figures['greedy_emitted_per_round']:.2f} | {by_position} |"
    )
