"""What every test shares."""

from __future__ import annotations

import transformers

transformers.logging.set_verbosity_error()
