"""`Row`: a measured value of `infer bench gpu` with its limit and its goal; `Peaks`: of the GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value, with its limit and its goal."""

    key: str
    what: str
    unit: str
    measured: float | None
    """The value in `unit`; None: it could not be measured here."""
    floor: float | None = None
    """The best value that the GPU's peaks allow, in `unit`; None: they set no limit."""
    wanted: float | None = None
    higher_is_better: bool = False

    @property
    def share(self) -> float | None:
        """The share of the limit that is reached; 1 = all of it."""
        if self.floor is None or self.measured is None:
            return None
        return self.measured / self.floor if self.higher_is_better else self.floor / self.measured

    @property
    def ok(self) -> bool | None:
        """Whether the goal is reached; None where there is no goal, or no measurement."""
        if self.wanted is None or self.measured is None:
            return None
        above = self.measured >= self.wanted
        return above if self.higher_is_better else self.measured <= self.wanted

    def as_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return {**asdict(self), "share": self.share, "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Peaks:
    """The measured peaks of the GPU: TB/s of a copy and of a read, Tflop/s of a product."""

    copy_tb_s: float
    read_tb_s: float
    product_tflop_s: float
