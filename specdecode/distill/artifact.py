"""What a run leaves: a directory that transformers loads.

Its head has all rows of the vocabulary; those that may not be drafted are the target's own, and
`draft_vocabulary.json` names those that may.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from specdecode.distill.student import Student
from specdecode.errors import FailedPreconditionError

VOCABULARY_NAME = "draft_vocabulary.json"
RECIPE_NAME = "distill.json"
CARD_NAME = "README.md"
HEAD = "lm_head.weight"
_FORMAT = 1
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
    except (OSError, SafetensorError) as error:
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


def _write_json(path: Path, value: Any) -> None:
    path.write_text(
        json.dumps(value, indent=None if path.name == VOCABULARY_NAME else 2) + "\n", encoding="utf-8"
    )
