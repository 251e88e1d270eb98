"""A distilled draft as what training changed of its target: small enough for a repository.

A delta directory holds `trained.safetensors` (tensors under their names in the draft, and `lm_head.rows`
[K, d] where the head was trained), the draft's `config.json` and `draft_vocabulary.json`, and `distill.json`,
which has the SHA-256 of the target's weights (`target.weights_sha256`) and, as `unchanged`, the target's name
of each tensor that the draft takes as it is. `assemble` puts the draft together with the target's own
directory, `write_delta` takes it apart.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdecode.checkpoints import Weights, copy_tokenizer, replacing
from specdecode.errors import FailedPreconditionError
from specdecode.lm import draft_vocabulary

TRAINED_NAME = "trained.safetensors"
RECORD_NAME = "distill.json"
HEAD_ROWS = "lm_head.rows"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def assemble(target_dir: Path, delta_dir: Path, out_dir: Path, recipe: Mapping[str, Any]) -> Path:
    """Builds the directory that transformers loads; what lay at `out_dir` is replaced.

    Raises:
        FailedPreconditionError: the delta belongs to another target, or its files contradict one another.
    """
    target, record = Weights(target_dir), _read_record(delta_dir)
    expected = record["target"]["weights_sha256"]
    if expected not in (found := target.sha256(), *target.file_digests()):
        raise FailedPreconditionError(
            f"{delta_dir / RECORD_NAME}: trained for a target whose weights have SHA-256 {expected}, "
            f"those in {target_dir} have {found}: distill a draft for this target"
        )
    tensors = _assembled(target, delta_dir, record["unchanged"])
    with replacing(out_dir, dict(recipe)) as staging:
        copy_tokenizer(target_dir, staging)
        generation = target_dir / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, staging / generation.name)
        for path in delta_dir.iterdir():
            if path.is_file() and path.name != TRAINED_NAME:
                shutil.copyfile(path, staging / path.name)
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    return out_dir


def _read_record(delta_dir: Path) -> dict[str, Any]:
    path = delta_dir / RECORD_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        complete = isinstance(record["target"]["weights_sha256"], str) and isinstance(
            record["unchanged"], dict
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FailedPreconditionError(f"{path}: can't be read: {error!r}") from error
    if not complete:
        raise FailedPreconditionError(f"{path}: target.weights_sha256 must be text, unchanged an object")
    return dict(record)


def _assembled(target: Weights, delta_dir: Path, unchanged: Mapping[str, str]) -> dict[str, Tensor]:
    """Every tensor of the draft by its name."""
    path = delta_dir / TRAINED_NAME
    try:
        tensors = {name: target.get(source) for name, source in unchanged.items()}
        tensors |= load_file(path)
    except (OSError, KeyError, SafetensorError) as error:
        raise FailedPreconditionError(f"{path}: can't be read: {error!r}") from error
    rows = tensors.pop(HEAD_ROWS, None)
    if _HEAD not in tensors:
        tensors[_HEAD] = target.get(_HEAD if _HEAD in target.names else _EMBEDDING).clone()
    if rows is not None:
        tensors[_HEAD] = _with_rows(tensors[_HEAD], rows, delta_dir)
    _check_complete(tensors, delta_dir)
    return tensors


def _with_rows(
    head: Tensor,  # [V, d]
    rows: Tensor,  # [K, d]
    delta_dir: Path,
) -> Tensor:
    """The head with its trained rows, [V, d]."""
    token_ids = draft_vocabulary.read_draft_vocabulary(delta_dir, len(head))
    expected = None if token_ids is None else (len(token_ids), head.shape[1])
    if token_ids is None or tuple(rows.shape) != expected:
        raise FailedPreconditionError(
            f"{delta_dir / TRAINED_NAME}: {HEAD_ROWS} is {list(rows.shape)}; {draft_vocabulary.FILE_NAME} "
            f"says {'nothing' if expected is None else list(expected)}"
        )
    return head.index_copy(0, token_ids, rows.to(head.dtype))


def _check_complete(tensors: Mapping[str, Tensor], delta_dir: Path) -> None:
    """Compares names and shapes with what transformers expects of the configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(delta_dir))
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise FailedPreconditionError(
                f"{delta_dir}: {name} is {found.get(name, 'missing')}, its config.json expects "
                f"{expected.get(name, 'no such tensor')}"
            )


def write_delta(target_dir: Path, draft_dir: Path, out_dir: Path) -> Path:
    """Writes what of a draft differs from its target; what its own `distill.json` says stays.

    Raises:
        FailedPreconditionError: the draft's head differs from the target's outside its draft vocabulary.
    """
    target, draft = Weights(target_dir), Weights(draft_dir)
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in target.names:
        by_shape[target.shape(name)].append(name)
    trained: dict[str, Tensor] = {}
    unchanged: dict[str, str] = {}
    for name in draft.names:
        tensor = draft.get(name)
        if name == _HEAD:
            trained |= _changed_rows(tensor, target, draft_dir)
            continue
        # Its own name first: of several equal tensors it is the one that is meant.
        candidates = sorted(by_shape[tuple(tensor.shape)], key=lambda source: source != name)
        source = next((c for c in candidates if torch.equal(target.get(c), tensor)), None)
        if source is None:
            trained[name] = tensor
        else:
            unchanged[name] = source
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(trained, out_dir / TRAINED_NAME)
    path = draft_dir / RECORD_NAME
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record["target"] = {**record.get("target", {}), "weights_sha256": target.sha256()}
    record["unchanged"] = unchanged
    (out_dir / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name in ("config.json", draft_vocabulary.FILE_NAME, "README.md"):
        if (draft_dir / name).is_file():
            shutil.copyfile(draft_dir / name, out_dir / name)
    for picture in draft_dir.glob("*.png"):
        shutil.copyfile(picture, out_dir / picture.name)
    return out_dir


def _changed_rows(
    head: Tensor,  # [V, d]
    target: Weights,
    draft_dir: Path,
) -> dict[str, Tensor]:
    """The rows of the draft vocabulary where they were trained; nothing where the head is the target's."""
    own = target.get(_HEAD if _HEAD in target.names else _EMBEDDING)
    if torch.equal(head, own):
        return {}
    token_ids = draft_vocabulary.read_draft_vocabulary(draft_dir, len(head))
    if token_ids is None:
        return {_HEAD: head}
    if not torch.equal(own.index_copy(0, token_ids, head[token_ids]), head):
        raise FailedPreconditionError(
            f"{draft_dir}: the head differs from the target's in rows that {draft_vocabulary.FILE_NAME} lacks"
        )
    return {HEAD_ROWS: head[token_ids]}
