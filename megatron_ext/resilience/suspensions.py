"""When this whole process did not run, as with a job that the scheduler suspends: nobody is to blame for what was not
done then."""

from collections import deque

_A_PAUSE = 3.0  # seconds by which a look is late: no processor was ever so busy


class Pauses:
    """Counts the time in which this process ran."""

    def __init__(self) -> None:
        self._pauses: deque[tuple[float, float]] = deque(maxlen=100)  # when each ended, and its seconds

    def note(self, now: float, due: float) -> None:
        """Note that what was due at `due` is done at `now`: very late, and this process did not run for a while."""
        if now - due > _A_PAUSE:
            self._pauses.append((now, now - due))

    def time_run(self, began: float, now: float) -> float:
        """Return the seconds since `began` in which this process ran."""
        return now - began - sum(seconds for end, seconds in self._pauses if end > began)
