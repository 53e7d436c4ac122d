"""A language that is a list of words, and which tokens may come next in it: by definition, without any grammar library."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer

from longcat_pd.server.text import TokenBytes

EOS = 2
_NUM_SPECIAL = 19  # ids of the tiny tokenizer that are no text


class Language:
    """Some words. ``grammar``: the same for the library."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> None:
        self.words = tuple(words)
        self.grammar = "start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
        self._bytes = [word.encode() for word in words]
        table = TokenBytes(tokenizer)
        known = tokenizer.get_vocab_size()
        self._tokens = {i: table[i] for i in range(_NUM_SPECIAL, min(known, vocab_size))}

    def is_open(self, answer: Sequence[int]) -> bool:
        """Whether an answer may have come so far."""
        if EOS in answer:
            place = list(answer).index(EOS)
            return set(answer[place:]) == {EOS} and self._text(answer[:place]) in self._bytes
        text = self._text(answer)
        return text is not None and any(word.startswith(text) for word in self._bytes)

    def allowed(self, answer: Sequence[int]) -> set[int]:
        """What may come behind an answer that is open."""
        if EOS in answer:
            return {EOS}
        text = self._text(answer)
        assert text is not None, answer
        rest = [word[len(text) :] for word in self._bytes if word.startswith(text)]
        found = {i for i, token in self._tokens.items() if token and any(r.startswith(token) for r in rest)}
        return found | ({EOS} if b"" in rest else set())

    def is_forced(self, answer: Sequence[int]) -> bool:
        """Whether all that may come begins alike."""
        text = self._text(answer)
        assert text is not None, answer
        firsts = {word[len(text) : len(text) + 1] for word in self._bytes if word.startswith(text)}
        return len(firsts) == 1

    def _text(self, answer: Sequence[int]) -> bytes | None:
        if any(token not in self._tokens for token in answer):
            return None
        return b"".join(self._tokens[token] for token in answer)
