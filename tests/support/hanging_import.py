"""A module whose import never ends, for a standby that does not answer."""

import time

time.sleep(3600)
