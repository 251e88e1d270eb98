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

from specdecode.checkpoints import copy_tokenizer
from specdecode.distill.student import Student
from specdecode.errors import FailedPreconditionError
from specdecode.lm.draft_vocabulary import write_draft_vocabulary

CARD_NAME = "README.md"
_HEAD = "lm_head.weight"
_GENERATION = "generation_config.json"


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
    state = {name: value.detach().to(dtype) for name, value in module.state_dict().items() if name != _HEAD}
    config = _config(module, str(dtype).removeprefix("torch."))
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.cpu().contiguous() for name, value in (state | {_HEAD: head}).items()}
        save_file(tensors, out_dir / "model.safetensors", {"format": "pt"})
        (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_tokenizer(target_dir, out_dir)
        if (target_dir / _GENERATION).is_file():
            shutil.copyfile(target_dir / _GENERATION, out_dir / _GENERATION)
        if reduced:
            write_draft_vocabulary(out_dir, student.vocabulary.tolist())
    except (OSError, SafetensorError) as error:
        raise FailedPreconditionError(f"--out: {out_dir} can't be written: {error}") from error


def _config(module: Any, dtype: str) -> dict[str, Any]:
    """The configuration as transformers saves it; nothing of where the target lay."""
    found: dict[str, Any] = module.config.to_diff_dict()
    return {key: value for key, value in found.items() if not key.startswith("_")} | {
        "architectures": [type(module).__name__],
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
