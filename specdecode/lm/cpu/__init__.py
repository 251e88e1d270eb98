"""Kernels of a step on a CPU: C++ that is compiled once on the machine that runs it."""

from specdecode.lm.cpu.kernels import Kernels, load_kernels
from specdecode.lm.cpu.sampling import DraftedRows, SamplingKernels

__all__ = ["DraftedRows", "Kernels", "SamplingKernels", "load_kernels"]
