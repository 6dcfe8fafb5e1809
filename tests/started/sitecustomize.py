"""Let each process that tests start load its libraries without going through them again and again as garbage.

Python imports this on its own, as it is on the path of these processes (tests/conftest.py). A quarter of the time that
torch and transformers take to load is the collector's; what is garbage is collected all the same, in larger heaps.
"""

import gc

gc.set_threshold(200_000, 20, 20)
