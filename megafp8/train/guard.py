"""A limit on non-finite steps."""

from __future__ import annotations

from megafp8.core.errors import NumericsError


class NonFiniteGuard:
    """Counts steps that every rank skipped because the loss or the gradient norm was not finite."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.in_a_row = 0

    def observe(self, step: int, *, finite: bool, loss: float, grad_norm: float, origin: str = "") -> None:
        """Note a step; `origin` says where one that is not finite broke.

        Raises:
            NumericsError: more than `limit` steps in a row were not finite.
        """
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.total += 0 if finite else 1
        if self.in_a_row > self.limit:
            raise NumericsError(
                f"step {step}: loss {loss} and gradient norm {grad_norm}, not finite for {self.in_a_row} steps in a "
                f"row (limit train.max_nonfinite_steps {self.limit}); {origin + '; ' if origin else ''}lower "
                "optimizer.lr or resume an older checkpoint"
            )
