"""Answers that are bound to a grammar: which token may come next, and what it leads to.

The one place that knows the grammar library, llguidance. It was chosen over others because it begins a grammar within
milliseconds and computes a mask when it is asked for one, so every rank can follow the tokens by itself and nothing
compiled has to travel; and because it refuses what a schema says and it cannot keep, where others look away. A grammar is a
text in its Lark dialect (``grammar_text.py`` writes them). Knows neither slots nor tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from longcat_pd.errors import ConfigError

Mask = npt.NDArray[np.int32]  # a bit for each id, the lowest first

ANYTHING = -1  # a word of a mask that forbids nothing
_MAX_KEPT = 32  # grammars whose beginning is kept for the next answer
_MAX_KEPT_TEXT = 1 << 20  # characters of them: each costs the library up to a hundred bytes
# what one mask may cost: some 50 ms in the worst case
_LIMITS = LLParserLimits(step_lexer_fuel=400_000, step_max_items=100_000, max_lexer_states=50_000, verbose_errors=False)


class Matcher:
    """Follows one answer through its grammar.

    ``fault``: why nothing more can be said about this answer; empty as long as it can. Behind a token that ends the answer
    only such tokens may come.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._is_over = False
        self.fault = _fault_of(matcher)

    def advance(self, token_ids: Iterable[int]) -> None:
        """These tokens belong to the answer now."""
        for token_id in token_ids:
            self._is_over = self._is_over or token_id in self._vocabulary.eos_token_ids
            if self._is_over or self.fault:
                return
            if not self._matcher.consume_token(token_id):
                self.fault = _fault_of(self._matcher)

    def fill(self, masks: Mask, drafts: Sequence[int]) -> None:
        """Row r of ``masks`` [W, words] becomes what may stand behind the first r of ``drafts`` [W - 1].

        Rows behind a draft that may not stand itself forbid nothing: nobody gets there.
        """
        num_followed = 0
        for row, mask in enumerate(masks):
            if self._is_over or self.fault:
                masks[row:] = self._vocabulary.ends
                break
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self.fault = _fault_of(self._matcher)
            if row == len(drafts) or self.fault:
                continue
            draft = drafts[row]
            if draft in self._vocabulary.eos_token_ids or not is_allowed(mask, draft):
                masks[row + 1 :] = self._vocabulary.ends if is_allowed(mask, draft) else ANYTHING
                break
            num_followed += 1
            if not self._matcher.consume_token(draft):
                self.fault = _fault_of(self._matcher)
        if num_followed and not self.fault and not self._matcher.rollback(num_followed):
            self.fault = _fault_of(self._matcher)


class Vocabulary:
    """The tokens of one checkpoint, as grammars see them. For one thread at a time.

    Args:
        tokenizer: what ``tokenizer.json`` says.
        vocab_size: ids that are drawn from; those that the tokenizer does not know are never allowed.
        eos_token_ids: tokens that may come where the grammar is fulfilled.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokens = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(self.eos_token_ids))
        self.num_words = -(-vocab_size // 32)
        self.ends = np.zeros(self.num_words, dtype=np.int32)
        for token_id in self.eos_token_ids:
            self.ends.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._begun: OrderedDict[str, LLMatcher] = OrderedDict()

    @classmethod
    def load(cls, folder: str, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary | None:
        """Of a checkpoint; None if it has no tokenizer, or nothing that ends an answer. Raises ConfigError for a tokenizer
        that cannot be read."""
        path, ends = Path(folder) / "tokenizer.json", frozenset(eos_token_ids)
        if not path.exists() or not ends:
            return None
        try:
            return cls(path.read_text(encoding="utf-8"), vocab_size, ends)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", param="model.path") from None

    def refusal(self, grammar: str) -> str:
        """Why this grammar cannot be kept; empty if it can. Takes milliseconds, and more for a very large one."""
        begun = self._beginning(grammar)
        return _fault_of(begun) or self._first_fault(begun.deep_copy())

    def begin(self, grammar: str) -> Matcher:
        """At the first token of an answer."""
        return Matcher(self, self._beginning(grammar).deep_copy())

    def _first_fault(self, matcher: LLMatcher) -> str:
        matcher.compute_bitmask()
        return _fault_of(matcher)

    def _beginning(self, grammar: str) -> LLMatcher:
        begun = self._begun.pop(grammar, None) or LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        self._begun[grammar] = begun
        while len(self._begun) > _MAX_KEPT or (len(self._begun) > 1 and sum(map(len, self._begun)) > _MAX_KEPT_TEXT):
            self._begun.popitem(last=False)
        return begun


def is_allowed(mask: Mask, token_id: int) -> bool:
    """Whether a mask [words] has the bit of this id."""
    return bool(mask[token_id // 32] >> token_id % 32 & 1)


def _fault_of(matcher: LLMatcher) -> str:
    return matcher.get_error().splitlines()[0] if matcher.is_error() else ""
