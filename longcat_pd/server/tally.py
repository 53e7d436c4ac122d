"""What the prompts of one body come to: each counts once, however many choices it has. Knows no answers and no bodies."""

from __future__ import annotations

from longcat_pd.engine.request import Life, Request, num_cached


class PromptTally:
    """Filled as the requests of a body are made."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._lives: dict[int, list[Life]] = {}

    def begin(self, prompt: int, request: Request) -> None:
        """The request of a choice of this prompt is made."""
        self._lengths[prompt] = len(request.asked_token_ids)
        self._lives.setdefault(prompt, []).append(request.life)

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(self._lengths.values())

    @property
    def num_cached(self) -> int:
        """Those that nobody had to compute."""
        return sum(min(num_cached(self._lives[prompt]), length) for prompt, length in self._lengths.items())

    @property
    def lives(self) -> list[Life]:
        """Of all requests."""
        return [life for lives in self._lives.values() for life in lives]
