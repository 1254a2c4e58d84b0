"""`Bucket`: a token bucket, refilled at a constant rate"""

from __future__ import annotations

from collections.abc import Callable


class Bucket:
    """A token bucket: `per_minute` at the start and at most, refilled at a constant rate."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.size = per_minute
        self._level = float(per_minute)
        self._clock = clock
        self._at_s = clock()

    def level(self) -> float:
        """Amount in the bucket now; below 0 after more was used than was reserved."""
        now_s = self._clock()
        filled = self._level + (now_s - self._at_s) * self.size / 60
        self._level, self._at_s = min(float(self.size), filled), now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is in the bucket; 0 = now."""
        return max(0.0, (amount - self.level()) * 60 / self.size)

    def take(self, amount: float) -> None:
        """Remove `amount`; a negative amount is given back."""
        self._level = min(float(self.size), self.level() - amount)

    def resize(self, per_minute: float) -> None:
        """Have another size and rate from now on; nothing is added to what is in the bucket."""
        self._level = min(float(per_minute), self.level())
        self.size = per_minute
