"""Settings for all tests; the doubles are in `tests/doubles.py`."""

import os

# The models here are so small that a second thread only waits for the first one.
os.environ["OMP_NUM_THREADS"] = "1"
