"""``longcat-pd plan FILE --advise``: layouts of both pools for so many cards, the best first, as text and as YAML.

Owns words and pairs of pools; layouts are looked for in ``sizing/search.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ClusterConfig, ParallelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.plan.estimate import card_for, cause_text, positive, rates_line
from longcat_pd.plan.fragment import fragment
from longcat_pd.sizing.candidates import Asked, pool_of
from longcat_pd.sizing.cards import usable_bytes
from longcat_pd.sizing.memory import GIB
from longcat_pd.sizing.rates import rates_of
from longcat_pd.sizing.search import Answer, Question, Search, Target, splits

USUAL_CONTEXT = 131072  # tokens of a sequence; all slots full at the longest that is allowed is what few clusters hold
ANSWER = 1024  # tokens
SHOWN = 3
MOST_CARDS = 1 << 14


class Pair(NamedTuple):
    """A pool of each role."""

    prefill: Answer
    decode: Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``--advise`` takes beside what ``--roofline`` does."""
    group = parser.add_argument_group("layouts instead, by these estimates")
    group.add_argument("--advise", action="store_true", help="look for better layouts of both pools")
    group.add_argument("--target", choices=get_args(Target), default="tokens-per-s", help="default: tokens-per-s")
    group.add_argument("--cards", type=int, metavar="N", help="of both pools; default: as many as the file has")
    group.add_argument("--prefill-cards", type=int, metavar="N", help="of these; default: every split by whole nodes")
    group.add_argument("--cards-per-node", type=int, metavar="N", help="default: devices_per_node")
    group.add_argument("--answer", type=int, default=ANSWER, metavar="TOKENS", help=f"of an answer; default: {ANSWER}")
    group.add_argument("--top", type=int, default=SHOWN, metavar="N", help=f"how many are shown; default: {SHOWN}")


def advice_lines(cluster: ClusterConfig, options: argparse.Namespace) -> Iterator[str]:
    """The best layouts, how the file's own stands beside them, and the best one as YAML.

    ``cluster`` is resolved; ``options`` has what ``add_arguments`` and that of ``estimate`` add. Raises ConfigError.
    """
    per_node = cluster.devices_per_node if options.cards_per_node is None else options.cards_per_node
    base = dataclasses.replace(cluster, devices_per_node=positive("cards-per-node", [per_node])[0])
    own = [pool_of(base, role) for role in ("prefill", "decode")]
    sizes = [pool.parallel.world_size * len(pool.instances) for pool in own]
    cards = sum(sizes) if options.cards is None else options.cards
    card = card_for(base, options.card)
    positive("cards", [cards], most=MOST_CARDS)
    for name, value in (("answer", options.answer), ("top", options.top)):
        positive(name, [value])
    asked = _asked(base, options)
    question = Question(
        target=options.target,
        asked=asked,
        answer=min(options.answer, asked.context - 1),
        usable_bytes=usable_bytes(base) or int(card.usable_gib.value * GIB),
        host_bytes=int(card.host_memory_gib.value * GIB),
    )
    rates = rates_of(card, cards_per_node=base.devices_per_node)
    search = Search(base, ModelConfig.load(base.model.path), rates=rates, question=question)
    yield rates_line(card, rates)
    shape = f"{asked.sequences} sequences of {asked.context} tokens, {question.answer} of them the answer"
    yield f"wanted: {options.target} for {shape}, on {cards} cards, {base.devices_per_node} a node"
    pairs = _pairs(search, _splits(cards, base, options), question=question)
    if not pairs:
        yield from _own_lines(search, pairs, question=question, cards=cards, sizes=sizes)
        raise ConfigError(f"no pair of layouts fits {shape}: more cards, fewer --sequences or a shorter --context")
    for number, pair in enumerate(pairs[: options.top], 1):
        yield ""
        yield f"{number}. {_headline(pair, question)}"
        yield from _pool_lines(pair.prefill, search)
        yield from _pool_lines(pair.decode, search)
    yield ""
    yield from _own_lines(search, pairs, question=question, cards=cards, sizes=sizes)
    yield ""
    yield "# the first as YAML, in place of the file's own sections; addresses are to be replaced"
    yield from fragment(base, pairs[0])


def _asked(base: ClusterConfig, options: argparse.Namespace) -> Asked:
    pool = pool_of(base, "decode")
    context = (positive("context", options.context) or (min(pool.engine.max_model_len, USUAL_CONTEXT),))[-1]
    sequences = (positive("sequences", options.sequences) or (pool.engine.max_num_seqs,))[-1]
    if context < 2:
        raise ConfigError(f"--context {context}: must be at least 2, a prompt and an answer", param="context")
    return Asked(context=context, sequences=sequences)


def _splits(cards: int, base: ClusterConfig, options: argparse.Namespace) -> list[tuple[int, int]]:
    first = options.prefill_cards
    if first is None:
        return list(splits(cards, base.devices_per_node))
    if not 0 < first < cards:
        raise ConfigError(f"--prefill-cards {first}: must be at least 1 and less than {cards}", param="prefill-cards")
    return [(first, cards - first)]


def _pairs(search: Search, tried: Sequence[tuple[int, int]], *, question: Question) -> list[Pair]:
    """The best first. Of each split the grids of either pool beside the best one of the other."""
    found: list[Pair] = []
    for prefill_cards, decode_cards in tried:
        prefills = search.answers("prefill", prefill_cards, lanes=decode_cards)
        decodes = search.answers("decode", decode_cards, lanes=prefill_cards)
        if prefills and decodes:
            found += [Pair(prefill, decodes[0]) for prefill in prefills]
            found += [Pair(prefills[0], decode) for decode in decodes[1:]]
    return sorted(found, key=lambda pair: _score(pair, question))


def _score(pair: Pair, question: Question) -> tuple[float, ...]:
    """The less the better; what the target does not ask decides among equals."""
    prefill, decode = pair
    ends = (prefill.estimate.seconds, decode.estimate.seconds)
    if question.target == "tokens-per-s":
        return (-min(prefill.requests_s, decode.requests_s), *ends)
    if question.target == "context":
        return (-min(prefill.context, decode.context), *ends)
    return ends if question.target == "prefill-ms" else ends[::-1]


def _headline(pair: Pair, question: Question) -> str:
    prefill, decode = pair
    tokens_s = min(prefill.requests_s, decode.requests_s) * question.answer
    bound = "prefill" if prefill.requests_s < decode.requests_s else "decode"
    cards = [answer.pool.parallel.world_size for answer in pair]
    text = f"{cards[0]} + {cards[1]} cards: prompt {prefill.estimate.seconds * 1e3:.0f} ms, step"
    text = f"{text} {decode.estimate.seconds * 1e3:.1f} ms, {tokens_s:.0f} tokens/s in all, bound by {bound}"
    longest = min(prefill.context, decode.context)
    return f"{text}, context up to {longest}" if question.target == "context" else text


def _pool_lines(answer: Answer, search: Search) -> Iterator[str]:
    need = f"{answer.heaviest.total_bytes / GIB:.1f} GiB a card"
    yield f"   {answer.role}: {layout_text(answer.pool.parallel)}; {need}{'' if search.fits(answer) else ', does not fit'}"
    yield f"      {cause_text(answer.estimate)}"


def layout_text(parallel: ParallelConfig) -> str:
    """``pp 8 x cp 8, ep 8 by gather, lmhead_tp 8``: the grid, and what differs from 1 beside it."""
    sizes = {name.removesuffix("_size"): value for name, value in vars(parallel).items() if name.endswith("_size")}
    grid = [f"{name} {sizes.pop(name)}" for name in ("pp", "cp", "dp", "kvp") if sizes[name] > 1] or ["one rank"]
    others = {name: value for name, value in sizes.items() if value > 1 and name not in ("pp", "cp", "dp", "kvp", "node")}
    shown = [f"{name} {value}" + f" by {parallel.moe_dispatch}" * (name == "ep") for name, value in others.items()]
    if parallel.ngram_tables == "host":
        shown.append("tables on the host")
    if parallel.pp_size > 1:
        shown.append(f"layers {list(parallel.layers_per_stage)}")
    return ", ".join([" x ".join(grid), *shown])


def _own_lines(
    search: Search, pairs: Sequence[Pair], *, question: Question, cards: int, sizes: Sequence[int]
) -> Iterator[str]:
    """The file's own layouts with room for what is asked, and how many are estimated better."""
    if cards != sum(sizes):
        return
    own = Pair(search.own("prefill"), search.own("decode"))
    better = sum(_score(pair, question) < _score(own, question) for pair in pairs)
    yield f"the file's own: {_headline(own, question)}; {better} of {len(pairs)} are estimated better"
    for answer in own:
        yield from _pool_lines(answer, search)
