"""What a run leaves: a directory that transformers loads, and the difference to the target that is shipped.

The directory's head has all rows of the vocabulary; those that may not be drafted are the target's own, and
`draft_vocabulary.json` names those that may. The difference holds only tensors that are not the target's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdecode.distill.student import Student
from specdecode.errors import FailedPreconditionError

VOCABULARY_NAME = "draft_vocabulary.json"
RECIPE_NAME = "distill.json"
CARD_NAME = "README.md"
DELTA_NAME = "trained.safetensors"
HEAD_ROWS = "lm_head.rows"
HEAD = "lm_head.weight"
_FORMAT = 1
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model", "generation_config.json",
)  # fmt: skip


def write_draft(
    student: Student,
    target: Any,
    target_dir: Path,
    out_dir: Path,
    reduced: bool,
) -> None:
    """Writes the directory that transformers loads, in the target's dtype.

    Args:
        target: the whole target, whose rows the head has outside the draft's vocabulary.
        reduced: whether only some ids may be drafted, which `draft_vocabulary.json` then says.
    Raises:
        FailedPreconditionError: it can't be written.
    """
    dtype = target.dtype
    head = target.get_output_embeddings().weight.detach().clone()
    head[student.vocabulary] = student.head.detach().to(head.device, dtype)
    module = student.module
    state = {name: value.detach().to(dtype) for name, value in module.state_dict().items() if name != HEAD}
    config = module.config.to_dict() | {
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        save_file({name: value.cpu().contiguous() for name, value in (state | {HEAD: head}).items()},
                  out_dir / "model.safetensors", {"format": "pt"})  # fmt: skip
        _write_json(out_dir / "config.json", config)
        for name in _TOKENIZER_FILES:
            if (target_dir / name).is_file():
                shutil.copyfile(target_dir / name, out_dir / name)
        if reduced:
            write_vocabulary(out_dir, student.vocabulary.tolist())
    except OSError as error:
        raise FailedPreconditionError(f"--out: {out_dir} can't be written: {error}") from error


def write_vocabulary(directory: Path, token_ids: list[int]) -> None:
    """Says which ids, ascending, a draft may propose."""
    _write_json(directory / VOCABULARY_NAME, {"format": _FORMAT, "token_ids": token_ids})


def vocabulary_of(directory: Path) -> list[int] | None:
    """The ids that a draft may propose; None where it may propose all."""
    path = directory / VOCABULARY_NAME
    if not path.is_file():
        return None
    ids: list[int] = json.loads(path.read_text(encoding="utf-8"))["token_ids"]
    return ids


def write_delta(directory: Path, target_dir: Path, out_dir: Path) -> int:
    """Writes what of a draft is not its target's: tensors, configuration, vocabulary, recipe and card.

    A tensor whose bytes some tensor of the target has is not stored: `distill.json` says under "unchanged"
    which one it is. Of a head with a reduced vocabulary the rows of that are stored, where they differ.

    Returns:
        Bytes written.
    Raises:
        FailedPreconditionError: a tensor has other rows outside the vocabulary than the target's.
    """
    own, theirs = _tensors(directory), _tensors(target_dir)
    ids = vocabulary_of(directory)
    known = {(tuple(tensor.shape), _digest(tensor)): name for name, tensor in theirs.items()}
    unchanged, stored = {}, {}
    for name, tensor in own.items():
        same = known.get((tuple(tensor.shape), _digest(tensor)))
        if same is not None:
            unchanged[name] = same
        elif name == HEAD and ids is not None:
            stored[HEAD_ROWS] = _head_rows(tensor, _head_of(theirs), ids)
        else:
            stored[name] = tensor
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, out_dir / DELTA_NAME, {"format": "pt"}
    )
    _write_json(out_dir / RECIPE_NAME, _recipe(directory) | {"unchanged": unchanged})
    copied = [CARD_NAME, "config.json", VOCABULARY_NAME, *(path.name for path in directory.glob("*.png"))]
    for name in copied:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, out_dir / name)
    return sum(path.stat().st_size for path in out_dir.iterdir())


def assembled(delta_dir: Path, target_dir: Path) -> dict[str, Tensor]:
    """A draft's tensors, put together again: the proof that a difference holds all of it."""
    theirs, stored = _tensors(target_dir), _tensors(delta_dir)
    unchanged: Mapping[str, str] = _recipe(delta_dir)["unchanged"]
    whole = {name: theirs[source] for name, source in unchanged.items()}
    rows = stored.pop(HEAD_ROWS, None)
    if rows is not None:
        head = _head_of(theirs).clone()
        head[torch.tensor(vocabulary_of(delta_dir))] = rows
        whole[HEAD] = head
    return whole | stored


def _head_rows(head: Tensor, theirs: Tensor, ids: list[int]) -> Tensor:
    rest = torch.ones(len(head), dtype=torch.bool)
    rest[ids] = False
    if not torch.equal(head[rest], theirs[rest]):
        raise FailedPreconditionError(
            f"{HEAD} has rows outside the draft's vocabulary that are not the target's"
        )
    return head[ids]


def _head_of(tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors[HEAD] if HEAD in tensors else tensors["model.embed_tokens.weight"]


def _digest(tensor: Tensor) -> bytes:
    import hashlib

    raw = tensor.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), key=str(tensor.dtype).encode()).digest()


def _tensors(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def _recipe(directory: Path) -> dict[str, Any]:
    path = directory / RECIPE_NAME
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _write_json(path: Path, value: Any) -> None:
    path.write_text(
        json.dumps(value, indent=None if path.name == VOCABULARY_NAME else 2) + "\n", encoding="utf-8"
    )
