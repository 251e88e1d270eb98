"""A whole run: the target writes texts, a student learns from them, and what it is worth is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from specdecode.checkpoints import sha256
from specdecode.delta import RECORD_NAME
from specdecode.distill.artifact import write_draft
from specdecode.distill.corpus import CorpusRecipe, CorpusWriter, Text, load_shard, shard_path
from specdecode.distill.evaluation import self_fed_alpha, tallies
from specdecode.distill.generation import Writer
from specdecode.distill.options import DistillOptions, TrainingOptions
from specdecode.distill.report import write_card, write_curves
from specdecode.distill.student import Student, build_student, load_target, require_plain_head
from specdecode.distill.training import Trainer
from specdecode.distill.vocabulary import frequent_ids
from specdecode.errors import FailedPreconditionError, InvalidArgumentError
from specdecode.lm.draft_vocabulary import read_draft_vocabulary, write_draft_vocabulary
from specdecode.lm.model import load_model
from specdecode.lm.runner import PagedLM
from specdecode.tokenizer import eos_token_ids, load_tokenizer

CHECKPOINT_NAME = "checkpoint.safetensors"
PLAN_NAME = "plan.json"
_GENERATION_SHARE = 0.4
_REPORT_SHARE = 0.05
_CHECKPOINT_SECONDS = 120.0
_REPORT_TEXTS = 240
_REPORT_DRAFT_TOKENS = 4
_SELF_FED_TEXTS = 60
_BLOCK_SIZE = 16


class Shown(Protocol):
    """Where a run says how far it is."""

    def __call__(self, stage: str, done: float, total: float, note: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How much is done, decided once: a run that is taken up again keeps to it.

    Attributes:
        steps: None until the corpus is there and a step was timed.
    """

    shards: tuple[int, ...]
    steps: int | None = None


class Shards:
    """The texts of a corpus, read when they are first asked for."""

    def __init__(self, directory: Path, recipe: CorpusRecipe, by_epoch: Sequence[int]) -> None:
        self.by_epoch = by_epoch
        self._directory, self._recipe = directory, recipe
        self._read: list[Text] = []
        self._num_read = 0
        self._ends: list[int] = []

    def of_epoch(self, epoch: int) -> list[Text]:
        """All texts of an epoch's shards, held out or not."""
        return self.first(self.by_epoch[min(epoch, len(self.by_epoch) - 1)])

    def all(self) -> list[Text]:
        """The whole corpus."""
        return self.first(max(self.by_epoch))

    def first(self, number: int) -> list[Text]:
        """All texts of the first shards."""
        while self._num_read < number:
            self._read += load_shard(shard_path(self._directory, self._num_read), self._recipe)
            self._num_read += 1
            self._ends.append(len(self._read))
        return self._read[: self._ends[number - 1]]


def distill(options: DistillOptions, shown: Shown) -> dict[str, Any]:
    """Does the whole run, going on where an earlier one of the same options was stopped.

    Returns:
        What `distill.json` says.
    Raises:
        SpecdecodeError: what was asked can't be done, or a stage failed; what was done is kept.
    """
    began = time.monotonic()
    recipe = _checked(options)
    options.work.mkdir(parents=True, exist_ok=True)
    plan = _corpus(options, recipe, shown)
    shards = Shards(_shards(options), recipe, plan.shards)
    held_out = [text.held_out for text in shards.all()]
    if len(set(held_out)) < 2:
        raise InvalidArgumentError.of(
            "--data", f"{len(held_out)} usable prompts are too few: some have to be held out of training"
        )
    student = _student(options, shards.all())
    trainer = _trained(options, plan, student, shards, recipe, began, shown)
    return _reported(options, trainer, recipe, shards, shown)


def _shards(options: DistillOptions) -> Path:
    return options.work / "corpus"


def _checked(options: DistillOptions) -> CorpusRecipe:
    """Refuses what can be refused before anything is computed."""
    weights = sorted(options.target.glob("*.safetensors"))
    if not weights:
        raise FailedPreconditionError(
            f"--target: {options.target} holds no model that can be loaded (no .safetensors file)"
        )
    config = _config(options.target)
    vocab_size = int(config.get("vocab_size", 0))
    if options.vocabulary is not None and not 1 <= options.vocabulary <= vocab_size:
        raise InvalidArgumentError.of(
            "--vocabulary", f"{options.vocabulary} must be from 1 to the target's {vocab_size} ids"
        )
    number = int(config.get("num_hidden_layers", 0))
    if not options.layers or any(not 0 <= layer < number for layer in options.layers):
        raise InvalidArgumentError.of(
            "--layers", f"{','.join(map(str, options.layers))}: the target has layers 0 to {number - 1}"
        )
    longest = int(config.get("max_position_embeddings", 0)) - options.max_tokens
    if longest < 1:
        raise InvalidArgumentError.of(
            "--target", f"its context has no room for a prompt and {options.max_tokens} tokens of an answer"
        )
    return CorpusRecipe(
        max_prompt_tokens=min(CorpusRecipe.max_prompt_tokens, longest),
        target_sha256=sha256(weights[0]) if len(weights) == 1 else " ".join(sha256(path) for path in weights),
        seed=options.training.seed,
        shard_size=options.shard_size,
        max_tokens=options.max_tokens,
        batch_size=options.batch_size,
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FailedPreconditionError(
            f"--target: {path} has no config.json that can be read: {error}"
        ) from error
    inner: dict[str, Any] = config.get("text_config", config)
    return inner


def _corpus(options: DistillOptions, recipe: CorpusRecipe, shown: Shown) -> Plan:
    """The shards, written where they are missing: as many as were asked for, or planned, or fit the time."""
    kept = _read_plan(options)
    shards = options.shards or (kept.shards if kept else None)
    if options.prompts:
        most = -(-len(options.prompts) // options.shard_size)
        shards = tuple(min(number, most) for number in shards or (most,))
    wanted = max(shards) if shards else None
    budget = 60 * options.minutes * _GENERATION_SHARE
    if wanted and all(shard_path(_shards(options), i).is_file() for i in range(wanted)):
        return _write_plan(options, Plan(shards or (wanted,), kept.steps if kept else None))
    writer, began, index = _writer(options, recipe), time.monotonic(), 0
    written = 0

    def advanced(tokens: int, share: float) -> None:
        nonlocal written
        written += tokens
        seconds = time.monotonic() - began
        note = f"shard {index + 1}, {written} tokens, {written / max(seconds, 1e-3):.0f}/s"
        if wanted:
            shown("texts", index + share, wanted, note)
        else:
            shown("texts", min(seconds, budget), budget, note)

    while index < wanted if wanted else index == 0 or time.monotonic() - began < budget:
        writer.shard(index, advanced)
        index += 1
    shown("texts", 1, 1, f"{index} shards")
    plan = Plan(shards or (index,), kept.steps if kept else None)
    return _write_plan(options, plan)


def _writer(options: DistillOptions, recipe: CorpusRecipe) -> CorpusWriter:
    tokenizer = load_tokenizer(options.target)
    stops = eos_token_ids(options.target, tokenizer)
    model = load_model(options.target, "auto", options.device)
    longest = min(recipe.max_prompt_tokens + recipe.max_tokens, model.max_length)
    blocks = recipe.batch_size * (-(-longest // _BLOCK_SIZE) + 1)
    lm = PagedLM(model, blocks, _BLOCK_SIZE)
    return CorpusWriter(
        Writer(lm, stops, recipe.batch_size, recipe.seed),
        tokenizer,
        _shards(options),
        recipe,
        options.prompts,
    )


def _student(options: DistillOptions, texts: Sequence[Text]) -> Student:
    target = load_target(options.target)
    require_plain_head(target, texts[0].hidden, texts[0].log_normaliser)
    ids = _vocabulary(options, texts, target.get_output_embeddings().weight.detach())
    student = build_student(
        target, options.layers, ids, options.fresh, options.train_head, options.training.seed
    )
    return student.to(torch.device(options.device))


def _vocabulary(
    options: DistillOptions,
    texts: Sequence[Text],
    head: torch.Tensor,  # [V, d]
) -> torch.Tensor:
    """The ids that may be drafted, decided once: a run that is given more texts keeps to them."""
    kept = read_draft_vocabulary(options.work, len(head))
    if kept is not None and len(kept) == options.vocabulary:
        return kept
    if options.vocabulary is None:
        return torch.arange(len(head))
    tokenizer = load_tokenizer(options.target)
    always = [*eos_token_ids(options.target, tokenizer), *tokenizer.all_special_ids]
    known = [text for text in texts if not text.held_out]
    ids = frequent_ids(known, options.vocabulary, always, head)
    write_draft_vocabulary(options.work, ids.tolist())
    return ids


def _trained(
    options: DistillOptions,
    plan: Plan,
    student: Student,
    shards: Shards,
    recipe: CorpusRecipe,
    began: float,
    shown: Shown,
) -> Trainer:
    def train(epoch: int) -> list[Text]:
        return [text for text in shards.of_epoch(epoch) if not text.held_out]

    steps = options.training.steps if options.steps_given else plan.steps
    device = torch.device(options.device)
    trainer = Trainer(student, train, options.training, device)
    if steps is None:
        left = 60 * options.minutes * (1 - _REPORT_SHARE) - (time.monotonic() - began)
        steps = max(1, int(left / trainer.time_step()))
    _write_plan(options, replace(plan, steps=steps))
    trainer.options = replace(options.training, steps=steps)
    identity = _identity(options, trainer.options, recipe)
    path = options.work / CHECKPOINT_NAME
    if path.is_file():
        trainer.load(path, identity)
    saved = time.monotonic()
    while trainer.state.step < steps:
        trainer.advance()
        if time.monotonic() - saved > _CHECKPOINT_SECONDS or trainer.state.step == steps:
            trainer.save(path, identity)
            saved = time.monotonic()
        shown("training", trainer.state.step, steps, trainer.latest)
    return trainer


def _identity(options: DistillOptions, training: TrainingOptions, recipe: CorpusRecipe) -> dict[str, Any]:
    """What a checkpoint has to agree on to be gone on from."""
    decided = {name: value for name, value in asdict(training).items() if name != "steps"}
    return decided | {
        "target": recipe.target_sha256,
        "layers": list(options.layers),
        "vocabulary": options.vocabulary,
        "fresh": options.fresh,
        "train_head": options.train_head,
    }


def _reported(
    options: DistillOptions, trainer: Trainer, recipe: CorpusRecipe, shards: Shards, shown: Shown
) -> dict[str, Any]:
    texts = shards.all()
    held_out = [text for text in texts if text.held_out][:_REPORT_TEXTS]
    target = load_target(options.target).to(options.device)
    student, dtype = trainer.student, getattr(torch, options.training.dtype)
    head = target.get_output_embeddings().weight.detach()
    shown("report", 0, 2, "teacher-forced")
    found = tallies(student, held_out, head, _REPORT_DRAFT_TOKENS, dtype)
    shown("report", 1, 2, "feeding on itself")
    sampled = held_out[:_SELF_FED_TEXTS]
    self_fed = {
        f"temperature {heat:g}": self_fed_alpha(student, target, sampled, _REPORT_DRAFT_TOKENS, heat, 0)
        for heat in (0.7, 1.0)
    }
    metrics = {
        "held_out_texts": len(held_out),
        "teacher_forced": {name: tally.figures() for name, tally in found.items()},
        "self_fed_alpha_by_position": self_fed,
    }
    recorded = _recorded(options, trainer, recipe, shards) | {"metrics": metrics}
    write_draft(student, target, options.target, options.out, options.vocabulary is not None)
    path = options.out / RECORD_NAME
    path.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")
    write_curves(options.out, trainer.state.curve, recorded)
    write_card(options.out, recorded)
    shown("report", 2, 2, str(options.out))
    return recorded


def _recorded(
    options: DistillOptions, trainer: Trainer, recipe: CorpusRecipe, shards: Shards
) -> dict[str, Any]:
    texts = shards.all()
    return {
        "format": 1,
        "command": options.command,
        "target": {"name": options.target.name, "weights_sha256": recipe.target_sha256},
        "student": {
            "layers": list(options.layers),
            "fresh": options.fresh,
            "vocabulary": options.vocabulary,
            "head_trained": options.train_head,
            "trained_parameters": sum(p.numel() for p in trainer.student.parameters().values()),
        },
        "corpus": asdict(recipe)
        | {
            "prompts": options.prompts_source,
            "shards_by_pass": list(shards.by_epoch),
            "texts": len(texts),
            "answer_tokens": sum(len(text.answer) for text in texts),
        },
        "training": asdict(trainer.options) | {"epochs": trainer.state.epoch + 1},
        "curve": trainer.state.curve,
    }


def _read_plan(options: DistillOptions) -> Plan | None:
    path = options.work / PLAN_NAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Plan(tuple(found["shards"]), found["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FailedPreconditionError(
            f"{path} can't be read: {error!r}; delete it to have it planned again"
        ) from error


def _write_plan(options: DistillOptions, plan: Plan) -> Plan:
    (options.work / PLAN_NAME).write_text(json.dumps(asdict(plan)) + "\n", encoding="utf-8")
    return plan
