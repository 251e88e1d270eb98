"""Building model directories that transformers loads by itself: from GGUF files, and from other models.

A directory is written beside its destination and renamed into place with its manifest, so that whatever has a
manifest is whole. The manifest names every file with its size and SHA-256, and the recipe it was built from.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

from specdecode.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST_NAME = "specdecode-manifest.json"
MANIFEST_FORMAT = 1

# Vocabularies whose merges were learned with every digit on its own; transformers' GGUF reader doesn't
# split them, which shows on runs of spaces before a number.
_DIGIT_SPLITTING = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".py")


@dataclass(frozen=True)
class Manifest:
    """What a directory holds and how it was made.

    Attributes:
        recipe: the inputs that decide the content; a different recipe means a stale directory.
        files: name -> (bytes, SHA-256 in hex) of every file except the manifest.
    """

    recipe: dict[str, Any]
    files: dict[str, tuple[int, str]]

    @classmethod
    def of(cls, directory: Path, recipe: dict[str, Any]) -> Manifest:
        """Describe the files that lie in `directory` now."""
        names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST_NAME)
        files = {name: ((directory / name).stat().st_size, sha256(directory / name)) for name in names}
        return cls(recipe=recipe, files=files)

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest of `directory`; None where there is none, or none that this version understands."""
        try:
            raw = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
            if raw["format"] != MANIFEST_FORMAT:
                return None
            files = {
                name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in raw["files"].items()
            }
            return cls(recipe=dict(raw["recipe"]), files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, directory: Path) -> None:
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        raw = {"format": MANIFEST_FORMAT, "recipe": self.recipe, "files": files}
        (directory / MANIFEST_NAME).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")

    def sizes_match(self, directory: Path) -> bool:
        """Whether every file is there with its size; costs microseconds."""
        paths = ((directory / name, size) for name, (size, _) in self.files.items())
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def checksums_match(self, directory: Path) -> bool:
        """Whether every byte is what was written; reads all files."""
        digests = ((directory / name, digest) for name, (_, digest) in self.files.items())
        return self.sizes_match(directory) and all(sha256(path) == digest for path, digest in digests)


def convert(
    gguf: Path, out_dir: Path, *, recipe: dict[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Turn a GGUF causal LM into a directory of bfloat16 safetensors and a tokenizer.

    Works for every architecture that transformers reads from GGUF; needs `specdecode[convert]`.

    Args:
        gguf: one file; a split GGUF has to be merged first.
        out_dir: replaced if it was built by this module, refused if it holds anything else.
        recipe: what the manifest says the directory was built from; the file's name and SHA-256 by default.
        overwrite: replace `out_dir` whatever it holds.
    Raises:
        NotFoundError: `gguf` is no file.
        InvalidArgumentError: `out_dir` holds something else.
        FailedPreconditionError: transformers cannot read this GGUF, or its packages are missing.
    """
    if not gguf.is_file():
        raise NotFoundError(f"no GGUF file at {gguf}")
    recipe = recipe or {"gguf": gguf.name, "gguf_sha256": sha256(gguf)}
    _check_replaceable(out_dir, overwrite)
    with _without_bars(), replacing(out_dir, recipe) as staging:
        model, tokenizer = _load_gguf(gguf)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    return out_dir


def keep_only(model: Any, keep_layers: Sequence[int]) -> None:
    """Cut a causal LM down, in place, to the layers of these indices."""
    config = model.config
    num_layers = int(config.num_hidden_layers)
    _check_layers(keep_layers, num_layers)
    _keep_modules(model, keep_layers, num_layers)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(config, name, [value[i] for i in keep_layers])
    config.num_hidden_layers = len(keep_layers)


def sha256(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Weights:
    """The tensors of a directory's safetensors files, read when they are asked for.

    Raises:
        FailedPreconditionError: there are none, or they can't be read.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        self._files: dict[str, Any] = {}
        try:
            for path in sorted(directory.glob("*.safetensors")):
                file: Any = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(list(file.keys()), file)
        except (OSError, SafetensorError) as error:
            raise FailedPreconditionError(f"{path}: can't be read: {error}") from error
        if not self._files:
            raise FailedPreconditionError(f"{directory} holds no safetensors weights")

    @property
    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor, which is not read."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        """One tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def file_digests(self) -> list[str]:
        """SHA-256 in hex of the file, where there is only one: what others may say instead of `sha256`."""
        paths = list(self._directory.glob("*.safetensors"))
        return [sha256(path) for path in paths] if len(paths) == 1 else []

    def sha256(self) -> str:
        """SHA-256 in hex of names, dtypes, shapes and contents, however they are spread over files."""
        import torch

        digest = hashlib.sha256()
        for name in self.names:
            tensor = self.get(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _load_gguf(gguf: Path) -> tuple[Any, Any]:
    """The model (bfloat16, dequantized) and the tokenizer that a GGUF file holds."""
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise FailedPreconditionError(
            f"reading GGUF needs {' and '.join(missing)}: pip install 'specdecode[convert]'"
        )
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    try:
        fields = GGUFReader(gguf).fields
        # Dequantized at load: packed blocks can neither be saved as safetensors nor run on the paged engine.
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, KeyError, NotImplementedError, RuntimeError, ImportError, OSError) as error:
        raise FailedPreconditionError(f"transformers cannot read {gguf.name}: {error}") from error
    _complete_tokenizer(tokenizer, fields, int(model.config.max_position_embeddings))
    _align_special_ids(model, tokenizer)
    return model, tokenizer


def _complete_tokenizer(tokenizer: Any, fields: dict[str, Any], context_length: int) -> None:
    """Add what transformers drops from a GGUF tokenizer: the digit split and the context length."""
    pre = fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() in _DIGIT_SPLITTING:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = context_length
    tokenizer.clean_up_tokenization_spaces = False


def _align_special_ids(model: Any, tokenizer: Any) -> None:
    """Make bos, eos and pad of model, generation config and tokenizer the same."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in (model.config, model.generation_config):
            setattr(config, name, getattr(tokenizer, name))
    # Both describe the GGUF file, not what is saved.
    for name in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(name, None)


def _check_layers(keep_layers: Sequence[int], num_layers: int) -> None:
    ascending = all(a < b for a, b in pairwise(keep_layers))
    if not keep_layers or not ascending or keep_layers[0] < 0 or keep_layers[-1] >= num_layers:
        raise InvalidArgumentError.of(
            "keep_layers", f"{list(keep_layers)} must be ascending indices from 0 to {num_layers - 1}"
        )


def _keep_modules(model: Any, keep_layers: Sequence[int], num_layers: int) -> None:
    import torch

    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == num_layers:
                setattr(parent, name, torch.nn.ModuleList([child[i] for i in keep_layers]))
                return
    raise FailedPreconditionError(f"{type(model).__name__} keeps its {num_layers} layers in no list to cut")


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy a tokenizer's files byte for byte, so that the fingerprints of the two tokenizers are equal."""
    skipped = {"config.json", "generation_config.json", MANIFEST_NAME}
    for path in source.iterdir():
        if path.is_file() and path.name not in skipped and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, destination / path.name)


def _check_replaceable(out_dir: Path, overwrite: bool) -> None:
    occupied = out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir()))
    if occupied and not overwrite and not (out_dir / MANIFEST_NAME).exists():
        raise InvalidArgumentError.of("out_dir", f"{out_dir} holds files that are not a converted model")


@contextmanager
def replacing(out_dir: Path, recipe: dict[str, Any]) -> Iterator[Path]:
    """A staging directory that becomes `out_dir`, with its manifest, if the block succeeds."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}~", dir=out_dir.parent) as scratch:
        staging = Path(scratch) / "new"
        staging.mkdir()
        yield staging
        Manifest.of(staging, recipe).write(staging)
        if out_dir.exists():
            os.rename(out_dir, Path(scratch) / "old")
        os.rename(staging, out_dir)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal; ours is the only one."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The dequantization bar heeds no switch; warnings go through handlers that hold the real stderr.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
