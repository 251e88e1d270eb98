"""The draft service: proposes tokens."""

from specdecode.cpu_threads import wait_briefly

wait_briefly()
