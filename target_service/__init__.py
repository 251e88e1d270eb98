"""The target service: verifies drafts on a paged KV cache."""

from specdecode.cpu_threads import wait_briefly

wait_briefly()
