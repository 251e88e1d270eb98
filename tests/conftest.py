"""What every test shares."""

from __future__ import annotations

import signal

import transformers
from hypothesis import HealthCheck, settings

transformers.logging.set_verbosity_error()

# How long an example takes says something of the machine's other work, nothing of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell that starts the suite in the background leaves it, and all its children, with interrupts ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
