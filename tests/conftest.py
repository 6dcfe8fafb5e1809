"""Ray as all tests of a process use it: on the loopback interface, without a token in the home folder. And Triton's
interpreter where there is no GPU.

Ray and Triton read this when they are imported; Ray remembers the token from then on.
"""

import os
from pathlib import Path

os.environ.setdefault("RAY_AUTH_TOKEN", "of-the-tests")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
