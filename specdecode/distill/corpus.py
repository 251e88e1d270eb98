"""What a student learns from: the target's answers in shards, each with the hidden states that made it.

A shard is one safetensors file, decided by the recipe and its index, and written whole or not at all; a run
that was stopped goes on with the first shard that is missing. The text of later tasks comes from the shard
`TEXT_LAG` before, so that as many processes can write shards side by side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdecode.distill.generation import Advanced, Order, Writer, Written
from specdecode.distill.prompts import Prompt, PromptKind, written_prompt
from specdecode.errors import FailedPreconditionError, InvalidArgumentError

TEXT_LAG = 2
_MAX_OWN_TOKENS = 96
_MAX_GIVEN_TOKENS = 160
_MARK = "\N{REPLACEMENT CHARACTER}mark\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class CorpusRecipe:
    """What decides the texts of a corpus; equal recipes give equal corpora on equal machines.

    Attributes:
        target_sha256: of the target's weights.
        shard_size: texts in a shard.
        max_tokens: an answer ends here at the latest.
        max_prompt_tokens: longer prompts are left out.
    """

    target_sha256: str
    seed: int = 0
    shard_size: int = 256
    max_tokens: int = 224
    max_prompt_tokens: int = 512
    batch_size: int = 64


@dataclass(frozen=True)
class Text:
    """One prompt and its answer.

    Attributes:
        token_ids: prompt, then answer.
        hidden: [n, d] for each answer token, what the target's head saw.
        log_normaliser: [n] float32.
    """

    kind: PromptKind
    temperature: float
    held_out: bool
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    hidden: Tensor
    log_normaliser: Tensor

    @property
    def answer(self) -> tuple[int, ...]:
        """The answer's tokens."""
        return self.token_ids[self.num_prompt_tokens :]


def shard_path(directory: Path, index: int) -> Path:
    """Where a shard lies."""
    return directory / f"shard-{index:04d}.safetensors"


def shard_paths(directory: Path) -> list[Path]:
    """The shards that are there, in order."""
    return sorted(directory.glob("shard-*.safetensors"))


def save_shard(path: Path, texts: Sequence[Text], recipe: CorpusRecipe) -> None:
    """Writes a shard in one piece.

    Raises:
        FailedPreconditionError: it can't be written, the disk is full for example.
    """
    tensors = {
        "token_ids": torch.tensor([i for text in texts for i in text.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
        "prompt_lengths": torch.tensor([text.num_prompt_tokens for text in texts], dtype=torch.int32),
        "hidden": torch.cat([text.hidden for text in texts]),
        "log_normaliser": torch.cat([text.log_normaliser for text in texts]),
    }
    meta = {
        "recipe": json.dumps(vars(recipe), sort_keys=True),
        "texts": json.dumps([[text.kind.value, text.temperature, text.held_out] for text in texts]),
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, meta)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise FailedPreconditionError(
            f"{path} can't be written: {error}; what was written before is kept, and the same command "
            "goes on from there"
        ) from error


def load_shard(path: Path, recipe: CorpusRecipe | None = None) -> list[Text]:
    """The texts of a shard.

    Raises:
        FailedPreconditionError: it is damaged, or of another recipe than the given one.
    """
    try:
        with safe_open(path, framework="pt") as file:
            meta: dict[str, str] = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FailedPreconditionError(
            f"{path} can't be read: {error}; delete it to have it made again"
        ) from error
    if recipe is not None and json.loads(meta["recipe"]) != json.loads(json.dumps(vars(recipe))):
        raise FailedPreconditionError(
            f"--out: {path} was made with another target or another recipe ({meta['recipe']}); "
            "choose another directory, or delete it"
        )
    return list(_texts(tensors, json.loads(meta["texts"])))


def _texts(tensors: Mapping[str, Tensor], meta: Sequence[Sequence[Any]]) -> Iterator[Text]:
    lengths, prompts = tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist()
    ids = torch.split(tensors["token_ids"], lengths)
    answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    hidden = torch.split(tensors["hidden"], answers)
    normalisers = torch.split(tensors["log_normaliser"], answers)
    for (kind, temperature, held_out), *rest in zip(meta, ids, prompts, hidden, normalisers, strict=True):
        tokens, prompt, states, normaliser = rest
        yield Text(
            PromptKind(kind), temperature, held_out, tuple(tokens.tolist()), prompt, states, normaliser
        )


class CorpusWriter:
    """Writes shards of a corpus with the target.

    Args:
        writer: the target.
        tokenizer: the target's.
        directory: where shards lie; made where it is missing.
        given: the user's own prompts, asked one after another; none: the written ones.
    """

    def __init__(
        self,
        writer: Writer,
        tokenizer: Any,
        directory: Path,
        recipe: CorpusRecipe,
        given: Sequence[Prompt] = (),
    ) -> None:
        self._writer, self._tokenizer = writer, tokenizer
        self._directory, self._recipe, self._given = directory, recipe, given
        directory.mkdir(parents=True, exist_ok=True)

    def shard(self, index: int, advanced: Advanced = lambda tokens, share: None) -> list[Text]:
        """The shard of this index, written now where it is missing; `advanced` hears of tokens written."""
        path = shard_path(self._directory, index)
        if path.is_file():
            return load_shard(path, self._recipe)
        orders = self._orders(index, advanced)
        if not orders:
            raise InvalidArgumentError.of(
                "--data",
                f"no prompt of shard {index} has at most {self._recipe.max_prompt_tokens} tokens",
            )
        written = {w.order.index: w for w in self._writer.write([o for _, o in orders], advanced)}
        texts = [_text(prompt, written[order.index]) for prompt, order in orders]
        save_shard(path, texts, self._recipe)
        return texts

    def _orders(self, index: int, advanced: Advanced) -> list[tuple[Prompt, Order]]:
        first = index * self._recipe.shard_size
        numbers = range(first, first + self._recipe.shard_size)
        if self._given:
            numbers = range(first, min(numbers.stop, len(self._given)))
            prompts = {number: self._given[number] for number in numbers}
        else:
            texts = self._given_texts(index - TEXT_LAG)
            prompts = {number: written_prompt(self._recipe.seed, number, texts) for number in numbers}
        own = self._own_messages([n for n, p in prompts.items() if p.kind is PromptKind.OWN], advanced)
        orders = []
        for number, prompt in prompts.items():
            ids = self._prompt_ids(prompt, own.get(number, ""))
            if len(ids) <= self._recipe.max_prompt_tokens:
                orders.append((prompt, Order(2 * number, ids, prompt.temperature, self._recipe.max_tokens)))
        return orders

    def _prompt_ids(self, prompt: Prompt, own: str) -> tuple[int, ...]:
        if prompt.text:
            return tuple(self._tokenizer(prompt.text).input_ids)
        messages = prompt.messages or (("user", own),)
        return tuple(self._chat(messages, add_generation_prompt=True))

    def _chat(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> list[int]:
        text = self._rendered(messages, add_generation_prompt)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _rendered(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str:
        listed = [{"role": role, "content": content} for role, content in messages]
        text: str = self._tokenizer.apply_chat_template(
            listed, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def _own_messages(self, numbers: Sequence[int], advanced: Advanced) -> dict[int, str]:
        """User messages that the target itself writes (as in Magpie, Xu et al. 2024)."""
        if not numbers:
            return {}
        opening = self._rendered((("user", _MARK),), add_generation_prompt=False).partition(_MARK)[0]
        ids = tuple(self._tokenizer(opening, add_special_tokens=False).input_ids)
        orders = [Order(2 * number + 1, ids, 0.9, _MAX_OWN_TOKENS) for number in numbers]
        return {
            written.order.index // 2: self._decoded(written.token_ids).strip()
            for written in self._writer.write(orders, lambda tokens, share: advanced(tokens, 0.0))
        }

    def _decoded(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _given_texts(self, index: int) -> dict[PromptKind, list[str]]:
        """Answers of a shard that later tasks are about: those not held out, cut to whole sentences."""
        if index < 0:
            return {}
        found: dict[PromptKind, list[str]] = {}
        for text in self.shard(index):
            if text.temperature < 1 and not text.held_out and text.kind in _TEXT_SOURCES:
                cut = _whole(self._decoded(text.answer[:_MAX_GIVEN_TOKENS]), text.kind)
                if len(cut) > 80:
                    found.setdefault(_TEXT_SOURCES[text.kind], []).append(cut)
        return found


_TEXT_SOURCES = {
    PromptKind.CHAT: PromptKind.CHAT,
    PromptKind.OWN: PromptKind.CHAT,
    PromptKind.CODE: PromptKind.CODE,
    PromptKind.DATA: PromptKind.DATA,
}


def _whole(text: str, kind: PromptKind) -> str:
    """The text up to its last whole sentence, or line where it is code or data."""
    ends = "\n" if kind in (PromptKind.CODE, PromptKind.DATA) else ".!?"
    return text[: max(text.rfind(end) for end in ends) + 1].strip()


def _text(prompt: Prompt, written: Written) -> Text:
    order = written.order
    return Text(
        kind=prompt.kind,
        temperature=prompt.temperature,
        held_out=prompt.held_out,
        token_ids=(*order.token_ids, *written.token_ids),
        num_prompt_tokens=len(order.token_ids),
        hidden=written.hidden,
        log_normaliser=written.log_normaliser,
    )
