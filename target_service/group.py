"""The processes of one replica whose model is dealt out: this one leads, the others run what it says.

They live and end together: a rank that is lost ends the replica, whoever started it starts it anew.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from specdecode import models, tokenizer
from specdecode.config import TargetSettings
from specdecode.errors import SpecdecodeError
from specdecode.lifetime import die_with
from specdecode.lm.memory import choose_device, choose_num_blocks
from specdecode.lm.model import LoadedModel, load_model, load_part
from specdecode.lm.ranks import Ranks
from specdecode.lm.runner import PagedLM
from specdecode.lm.sharding import read_configs
from specdecode.serving import configure_logging

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0


class Group:
    """The other ranks, as child processes of this one."""

    def __init__(self, settings: TargetSettings, address: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        others = range(1, settings.tensor_parallel)
        self._processes: Sequence[BaseProcess] = [
            spawn.Process(target=_follow, args=(settings, rank, address, os.getpid()), daemon=True)
            for rank in others
        ]
        for process in self._processes:
            process.start()
        self._is_stopping = False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def stop(self, ranks: Ranks) -> None:
        """Lets the others end; the engine has."""
        self._is_stopping = True
        ranks.stop()
        for process in self._processes:
            process.join(_END_SECONDS)
        self.kill()
        ranks.close()

    def kill(self) -> None:
        """Ends the others now."""
        self._is_stopping = True
        for process in self._processes:
            process.kill()

    def _watch(self) -> None:
        connection.wait([process.sentinel for process in self._processes])
        if not self._is_stopping:
            # A step that waits for the lost rank may never return, so nothing can be drained.
            logger.error("a rank of the model ended; the replica ends with it")
            logging.shutdown()
            os._exit(1)


def load(settings: TargetSettings) -> tuple[PagedLM, Group | None]:
    """The model on its pool, and the processes that hold its other parts.

    Raises:
        SpecdecodeError: the model can't be found, loaded, served or dealt out.
    """
    if settings.tensor_parallel == 1:
        path = models.resolve(settings.model)
        device = choose_device(settings.device)
        return _on_pool(settings, path, load_model(path, settings.dtype, device, settings.kernels)), None
    read_configs(models.resolve(settings.model), settings.tensor_parallel)  # refused before anything starts
    address = _free_address()
    group = Group(settings, address)
    try:
        return _load_part(settings, 0, address), group
    except BaseException:
        group.kill()
        raise


def _load_part(settings: TargetSettings, rank: int, address: str) -> PagedLM:
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    path = models.resolve(settings.model)
    device = choose_device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    ranks = Ranks.meet(rank, settings.tensor_parallel, address, device)
    return _on_pool(settings, path, load_part(path, settings.dtype, device, ranks))


def _on_pool(settings: TargetSettings, path: Path, model: LoadedModel) -> PagedLM:
    model = model.limited(tokenizer.vocab_size(tokenizer.load_tokenizer(path)), settings.max_length)
    num_blocks = choose_num_blocks(model, settings, settings.max_running)
    if model.ranks is not None:
        num_blocks = model.ranks.least(num_blocks)
    return PagedLM(model, num_blocks, settings.block_size, settings.prefix_cache)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _follow(settings: TargetSettings, rank: int, address: str, parent: int) -> None:
    """What a process of another rank does."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 says when to end
    configure_logging("target", settings.log_level)
    try:
        lm = _load_part(settings, rank, address)
    except SpecdecodeError as error:
        logger.error("rank %d: %s", rank, error.message)
        sys.exit(1)
    lm.follow()
    if lm.model.ranks is not None:
        lm.model.ranks.close()
