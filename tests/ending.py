"""End a process of pytest-xdist once all that waits for its end was called: Python would take apart what it holds.

That takes seconds, and nobody asks for the exit code. This is imported first, as what is registered first comes last.
"""

import atexit
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
