"""What a distillation is asked for, with the defaults; needs nothing that takes long to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from specdecode.distill.prompts import Prompt

WORK_NAME = "work"


class Loss(StrEnum):
    """Which loss; `specdecode.distill.losses` defines them."""

    LK = "lk"
    KL = "kl"
    REVERSE_KL = "reverse-kl"
    TV = "tv"
    CE = "ce"


class Optimiser(StrEnum):
    """AdamW for everything, or Muon (Jordan et al. 2024) for the layers' matrices and AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


@dataclass(frozen=True)
class TrainingOptions:
    """What decides a run, besides student and texts.

    Attributes:
        steps: of the optimiser. The learning rate rises over `warmup_steps`, stays, and falls as a cosine to
            a twentieth over the last two fifths (Hägele et al. 2024): until then a run can be made longer.
        num_positions: padded positions in a batch.
        dtype: of products; weights and sums are float32.
    """

    loss: Loss = Loss.LK
    steps: int = 1000
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    num_positions: int = 1024
    weight_decay: float = 0.01
    optimiser: Optimiser = Optimiser.ADAMW
    seed: int = 0
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class DistillOptions:
    """What `specdecode distill` is asked for.

    Attributes:
        layers: which layers of the target the student starts from.
        vocabulary: ids that it may draft; None: all.
        minutes: for everything together; decides how many shards and steps there are where none are given.
        shards: of the corpus that each pass is over, the last number for all later passes: training can
            begin while later shards are written, and be given more of them.
    """

    target: Path
    out: Path
    layers: tuple[int, ...]
    vocabulary: int | None = 8192
    fresh: bool = False
    train_head: bool = True
    minutes: float = 60.0
    shards: tuple[int, ...] | None = None
    shard_size: int = 256
    max_tokens: int = 224
    batch_size: int = 64
    prompts: tuple[Prompt, ...] = ()
    prompts_source: str = "written"
    training: TrainingOptions = field(default_factory=TrainingOptions)
    steps_given: bool = False
    device: str = "cpu"
    command: str = "specdecode distill"

    @property
    def work(self) -> Path:
        """Where texts and checkpoints lie, which nobody needs after the run."""
        return self.out / WORK_NAME
