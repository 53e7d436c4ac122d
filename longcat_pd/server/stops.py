"""Finding stop strings in a text that comes in pieces, however it is cut.

Knows neither tokens nor markers. The text is read character by character, so the first stop string to be complete wins;
of several that are complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on, except the longest tail that may still become a stop string, until one is found.

    Args:
        num_exempt: pieces at the beginning that are passed on without a look; no stop string begins in them either.
        keeps_match: the stop string is passed on as well, so no text has to wait for what it may become.
    """

    def __init__(self, stops: Sequence[str], num_exempt: int = 0, *, keeps_match: bool = False) -> None:
        self.keeps_match = keeps_match
        self._stops = tuple(stops)
        self._num_exempt = num_exempt
        self._borders = tuple(_borders(stop) for stop in stops)
        self._matched = [0] * len(self._stops)  # leading characters of each stop that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be passed on, and the stop string if it is complete: then nothing behind it will ever be."""
        if not self._stops:
            return text, None
        if self._num_exempt:
            self._num_exempt -= 1
            return text, None
        buffer = self._held + text
        for place in range(len(self._held), len(buffer)):
            found = self._step(buffer[place])
            if found is not None:
                self._held = ""
                return buffer[: place + 1 - (0 if self.keeps_match else len(found))], found
        cut = len(buffer) - (0 if self.keeps_match else max(self._matched))
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The end of the text has come: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        found: str | None = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length = self._matched[i]
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            self._matched[i] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _borders(word: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper beginning that is also its end (Knuth, Morris, Pratt)."""
    borders = [0] * len(word)
    for place in range(1, len(word)):
        length = borders[place - 1]
        while length and word[place] != word[length]:
            length = borders[length - 1]
        borders[place] = length + (word[place] == word[length])
    return tuple(borders)
