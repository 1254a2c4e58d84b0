"""A module whose import never ends, for a standby that is never there."""

import time

time.sleep(3600)
