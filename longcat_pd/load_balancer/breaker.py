"""When an instance that keeps failing is left alone for a while. Knows no other instance."""

from __future__ import annotations

from longcat_pd.clock import BREAKER_FAILURES, BREAKER_OPEN_S, Clock


class Breaker:
    """Keeps an instance out of the choice for 10 s after 5 failures of its own in a row, then lets one request try."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until: float | None = None
        self._trial_runs = False

    @property
    def is_open(self) -> bool:
        """Whether it has opened and no trial has succeeded since."""
        return self._open_until is not None

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self._open_until is None or (self._clock.now() >= self._open_until and not self._trial_runs)

    def take(self) -> bool:
        """A request is sent. Whether it is the trial; that one is to be given back with ``release``."""
        is_trial = self.is_open and not self._trial_runs
        self._trial_runs = self._trial_runs or is_trial
        return is_trial

    def release(self) -> None:
        """The trial ended; if it got no verdict, the next request is a trial."""
        self._trial_runs = False

    def succeed(self) -> None:
        """That request was answered well: the row of failures ends, the breaker closes."""
        self._failures, self._open_until, self._trial_runs = 0, None, False

    def fail(self, *, may_open: bool) -> None:
        """That request failed through this instance. ``may_open`` is false for the only ready one of a role."""
        self._failures += 1
        self._trial_runs = False
        if self._failures >= BREAKER_FAILURES and may_open:
            self._open_until = self._clock.now() + BREAKER_OPEN_S
