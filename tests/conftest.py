"""What every test shares."""

from __future__ import annotations

import signal

import transformers

transformers.logging.set_verbosity_error()

# A shell that starts the suite in the background leaves it, and all its children, with interrupts ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
