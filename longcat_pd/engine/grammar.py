"""Answers that are bound to a grammar: which token may come next, and what it leads to.

The one place that knows the grammar library, llguidance. It was chosen over others because it begins a grammar within
milliseconds and computes a mask when it is asked for one, so every rank can follow the tokens by itself and nothing
compiled has to travel; and because it refuses what a schema says and it cannot keep, where others look away. A grammar is a
text in its Lark dialect (``grammar_text.py`` writes them). Knows neither slots nor tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from longcat_pd.errors import ConfigError

Mask = npt.NDArray[np.int32]  # a bit for each id, the lowest first

ANYTHING = -1  # a word of a mask that forbids nothing
_MAX_KEPT = 32  # grammars whose beginning is kept for the next answer
_MAX_KEPT_TEXT = 1 << 20  # characters of them: each costs the library up to a hundred bytes
# what one mask may cost: some 100 ms in the worst case
_LIMITS = LLParserLimits(
    step_lexer_fuel=400_000,
    step_max_items=100_000,
    max_items_in_row=10_000,  # the largest objects that are taken need some 4,000 behind their first character
    max_lexer_states=50_000,
    verbose_errors=False,
)


class Matcher:
    """Follows one answer through its grammar.

    ``fault``: why nothing more can be said about this answer; empty as long as it can. Behind a token that ends the answer
    only such tokens may come.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._matcher = vocabulary.beginning(grammar)
        self._said: list[int] = []
        self._is_over = False
        self._ahead: tuple[int, str] | None = None  # behind so many drafts of the last masks it gets no further: why
        self.fault = _fault_of(self._matcher)

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens belong to the answer now."""
        if self._ahead is not None and len(token_ids) > self._ahead[0]:
            self.fault = self._ahead[1]
        self._ahead = None
        for token_id in token_ids:
            self._is_over = self._is_over or token_id in self._vocabulary.eos_token_ids
            if self._is_over or self.fault:
                return
            self._said.append(token_id)
            if not self._matcher.consume_token(token_id):
                self.fault = self._read_anew()

    def fill(self, masks: Mask, drafts: Sequence[int]) -> None:
        """Row r of ``masks`` [W, words] becomes what may stand behind the first r of ``drafts`` [W - 1].

        Rows behind a draft that may not stand itself forbid nothing: nobody gets there.
        """
        if not self._is_over and not self.fault:
            row, fault = self._follow(masks, drafts)
            if fault:
                self.fault = self._read_anew()
                row, fault = self._follow(masks, drafts)
            if fault:
                self._read_anew()  # for what drafts have met is none of the answer's fault unless they stand
                self._ahead = row, fault
                self.fault = "" if row else fault
        if self._is_over or self.fault:
            masks[:] = self._vocabulary.ends

    def _follow(self, masks: Mask, drafts: Sequence[int]) -> tuple[int, str]:
        """Fill and come back. How many drafts were followed, and what went wrong behind them."""
        masks[:] = ANYTHING
        matcher, num_followed = self._matcher, 0
        for row, mask in enumerate(masks):
            if row and not matcher.consume_token(drafts[row - 1]):
                break
            num_followed = row
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error() or row == len(drafts) or not is_allowed(mask, drafts[row]):
                break
            if drafts[row] in self._vocabulary.eos_token_ids:
                masks[row + 1 :] = self._vocabulary.ends
                break
        if not matcher.is_error():
            matcher.rollback(num_followed)
        return num_followed, _fault_of(matcher)

    def _read_anew(self) -> str:
        """Go on from a reading of its own; what is wrong with the answer by that.

        The library never forgets a fault, and matchers of one reading share what it was about.
        """
        self._vocabulary.forget(self._grammar)
        self._matcher = self._vocabulary.beginning(self._grammar)
        self._matcher.consume_tokens(self._said)
        return _fault_of(self._matcher)


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
        self._read: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # the least recently begun first
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="grammar")

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
        matcher = self.beginning(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return _fault_of(matcher)

    def begin(self, grammar: str) -> Matcher:
        """At the first token of an answer."""
        return Matcher(self, grammar)

    def prepare(self, grammar: str) -> None:
        """Read a grammar that will be begun soon, in a thread: a large one takes longer than a step."""
        if grammar not in self._read:
            self._keep(grammar, self._reader.submit(self._matcher_of, grammar))

    def beginning(self, grammar: str) -> LLMatcher:
        """The library's own, at the first token."""
        self.prepare(grammar)
        self._read.move_to_end(grammar)
        return self._read[grammar].result().deep_copy()

    def forget(self, grammar: str) -> None:
        """Read it anew for whoever begins it next."""
        self._read.pop(grammar, None)

    def _matcher_of(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)

    def _keep(self, grammar: str, matcher: Future[LLMatcher]) -> None:
        self._read[grammar] = matcher
        while len(self._read) > _MAX_KEPT or (len(self._read) > 1 and sum(map(len, self._read)) > _MAX_KEPT_TEXT):
            self._read.popitem(last=False)


def is_allowed(mask: Mask, token_id: int) -> bool:
    """Whether a mask [words] has the bit of this id."""
    return bool(mask[token_id // 32] >> token_id % 32 & 1)


def _fault_of(matcher: LLMatcher) -> str:
    return matcher.get_error().splitlines()[0] if matcher.is_error() else ""
