"""Ray as all tests of a process use it: on the loopback interface, without a token in the home folder.

Ray reads this when it is imported, and remembers the token from then on.
"""

import os

os.environ.setdefault("RAY_AUTH_TOKEN", "of-the-tests")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
