"""Drawing tokens: one number for each key, filters, and the token that the number falls on.

Two executions of one definition. ``draw`` and ``draw_edited`` look at the data and do no more than the rows ask for; their
static forms have one shape of work, made of operators that graph compilers of accelerators know. Both add the same fp64
numbers one after the other in the same order, so on a CPU they agree to the bit, and a row's token does not depend on the
rows beside it. Of ``keyed_uniform`` too there is one in operators that those compilers know: they have no shifts and no
exclusive or.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.kernels.drawing_ops import ENDS, IN_PROMPT, Edits

MAX_ELEMENTS = 1 << 22  # logits that are drawn from at once: in fp64, sorted and summed up they take twenty times as much

# splitmix64's constants as signed integers, whose sums and products wrap around to the same bits.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_BITS = (*(1 << place for place in range(31)), -(1 << 31))  # of a word of a mask, the lowest first


def keyed_uniform(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """See ``ops.KeyedUniform``."""
    return _keyed((seeds, choices, positions), torch.bitwise_xor, _shifted)


def keyed_uniform_static(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """See ``ops.KeyedUniform``."""
    return _keyed((seeds, choices, positions), _xor_static, _shifted_static)


def draw(logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor, uniform: Tensor) -> Tensor:
    """See ``ops.Draw``. Sorts only rows with a filter, and no further than the largest ``top_k`` if all have one."""
    chosen = logits.argmax(-1)
    for drawn in _runs(temperature > 0.0, logits.shape[-1]):
        scaled = _scaled(logits[drawn], temperature[drawn])
        weights = scaled.softmax(-1)
        _cut(weights, scaled, counts=_counts(top_k[drawn], logits.shape[-1]), shares=top_p[drawn])
        if (floor[drawn] > -torch.inf).any():
            weights.masked_fill_(scaled < floor[drawn].unsqueeze(-1), 0.0)
        chosen[drawn] = _inverse_cdf(weights, uniform[drawn])
    return chosen


def _runs(is_meant: Tensor, num_ids: int) -> Iterator[Tensor]:
    """Numbers of the rows that are meant, no more at once than there is room for."""
    rows = is_meant.nonzero().squeeze(1)
    yield from torch.split(rows, max(MAX_ELEMENTS // num_ids, 1)) if len(rows) else ()


def _cut(weights: Tensor, scaled: Tensor, *, counts: Tensor, shares: Tensor) -> None:
    """Leaves of ``weights`` what is among the ``counts`` best and the ``shares``."""
    num_ids = weights.shape[-1]
    cut = ((counts < num_ids) | (shares < 1.0)).nonzero().squeeze(1)
    if not len(cut):
        return
    scaled, counts = scaled[cut], counts[cut]
    longest = int(counts.max())
    best = scaled.topk(longest) if longest < num_ids else scaled.sort(-1, descending=True)
    last, count = _last(weights[cut], *best, counts=counts, shares=shares[cut])
    stays = scaled >= last
    if not torch.equal(stays.sum(-1, keepdim=True), count):
        stays = _first_of_equals(scaled, last, count)
    weights[cut] = weights[cut].masked_fill_(~stays, 0.0)


def draw_static(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor, uniform: Tensor
) -> Tensor:
    """See ``ops.Draw``. Every row is sorted and drawn, whatever it asks for."""
    is_drawn = temperature > 0.0
    scaled = _scaled(logits, temperature.masked_fill(~is_drawn, 1.0))
    counts = _counts(top_k, logits.shape[-1])
    weights = scaled.softmax(-1)
    last, count = _last(weights, *scaled.sort(-1, descending=True), counts=counts, shares=top_p)
    weights = weights.masked_fill(~_first_of_equals(scaled, last, count), 0.0)
    weights = weights.masked_fill(scaled < floor.unsqueeze(-1), 0.0)
    return torch.where(is_drawn, _inverse_cdf(weights, uniform), logits.argmax(-1))


def draw_edited(logits: Tensor, edits: Edits, *, temperature: Tensor, **filters: Tensor) -> Tensor:
    """See ``ops.DrawEdited``. Makes other logits only of rows for which something is asked."""
    is_edited = _is_edited(edits)
    chosen = draw(logits, temperature=temperature.masked_fill(is_edited, 0.0), **filters)
    for rows in _runs(is_edited, logits.shape[-1]):
        theirs = {name: column[rows] for name, column in filters.items()}
        chosen[rows] = draw(edited(logits[rows], _of_rows(edits, rows)), temperature=temperature[rows], **theirs)
    return chosen


def edited(logits: Tensor, edits: Edits) -> Tensor:
    """The logits [T, V] that ``ops.DrawEdited`` draws from. No row is calculated anew where masks are all that is asked."""
    x = _recalculated(logits, edits) if _is_recalculated(edits).any() else logits
    return _masked(x, edits)


def draw_edited_static(logits: Tensor, edits: Edits, **filters: Tensor) -> Tensor:
    """See ``ops.DrawEdited``. Every row is calculated anew, whatever it asks for."""
    return draw_static(_masked(_recalculated(logits, edits), edits), **filters)


def _masked(x: Tensor, edits: Edits) -> Tensor:
    """Without the ids that may not come."""
    is_allowed = _is_allowed(edits, x.shape[1])
    is_late = ~(edits.is_early.unsqueeze(1) & _has(edits.flags[edits.seqs], ENDS)) & is_allowed
    stays = torch.where(is_late.any(1, keepdim=True), is_late, is_allowed)  # an answer that can only end ends
    return x.masked_fill(~stays, -torch.inf)


def _recalculated(logits: Tensor, edits: Edits) -> Tensor:
    """Bias and penalties."""
    seqs, drafts = edits.seqs, edits.drafts
    counts = edits.counts[seqs].scatter_add(1, drafts.clamp_min(0), (drafts >= 0).to(edits.counts.dtype))
    is_used = counts > 0
    x = logits.double().scatter_add(1, edits.bias_ids[seqs], edits.bias[seqs].double())
    factor = edits.repetition.unsqueeze(1)
    is_seen = is_used | _has(edits.flags[seqs], IN_PROMPT)
    x = torch.where(is_seen, torch.where(x > 0.0, x / factor, x * factor), x)
    return (x - edits.frequency.unsqueeze(1) * counts - edits.presence.unsqueeze(1) * is_used).float()


def _is_allowed(edits: Edits, num_ids: int) -> Tensor:
    """What the masks leave, [T, V]. They may be narrower: ids behind their end are in no grammar."""
    bits = torch.tensor(_BITS, dtype=torch.int32, device=edits.masks.device)
    is_in = ((edits.masks.unsqueeze(2) & bits) != 0).flatten(1)[:, :num_ids]
    return torch.nn.functional.pad(is_in, (0, num_ids - is_in.shape[1])) | ~edits.is_bound.unsqueeze(1)


def _has(flags: Tensor, flag: int) -> Tensor:
    """Where it is among the flags. A tensor too: compilers of accelerators know no bits of a tensor and a number."""
    return (flags & torch.full((), flag, dtype=flags.dtype, device=flags.device)) != 0


def _is_edited(edits: Edits) -> Tensor:
    """The rows whose logits anything is to be done to."""
    return _is_recalculated(edits) | edits.is_early | edits.is_bound


def _is_recalculated(edits: Edits) -> Tensor:
    """The rows with a bias or a penalty."""
    has_penalty = (edits.frequency != 0.0) | (edits.presence != 0.0) | (edits.repetition != 1.0)
    return has_penalty | (edits.bias != 0.0).any(1)[edits.seqs]


def _of_rows(edits: Edits, rows: Tensor) -> Edits:
    own = ("seqs", "drafts", "is_early", "frequency", "presence", "repetition", "masks", "is_bound")
    return edits._replace(**{name: column[rows] for name, column in edits._asdict().items() if name in own})


def _keyed(
    key: Sequence[Tensor], xor: Callable[[Tensor, Tensor], Tensor], shifted: Callable[[Tensor, int], Tensor]
) -> Tensor:
    def mixed(x: Tensor) -> Tensor:
        x = x + _ODD
        x = xor(x, shifted(x, 30)) * _FACTORS[0]
        x = xor(x, shifted(x, 27)) * _FACTORS[1]
        return xor(x, shifted(x, 31))

    state = mixed(key[0])
    for part in key[1:]:
        state = mixed(xor(state, part))
    return shifted(state, 11).double() * 2.0**-53


def _shifted(x: Tensor, count: int) -> Tensor:
    """``x >> count`` of the bits: the mask takes away the copies of the sign."""
    return x.bitwise_right_shift(count).bitwise_and(2 ** (64 - count) - 1)


def _xor_static(x: Tensor, y: Tensor) -> Tensor:
    """What is in one of both: a difference without borrows, so without overflow either."""
    return (x | y) - (x & y)


def _shifted_static(x: Tensor, count: int) -> Tensor:
    """The same by floor division, which copies the sign into the upper bits too."""
    mask = torch.full((), 2 ** (64 - count) - 1, dtype=torch.int64, device=x.device)
    return torch.div(x, 2**count, rounding_mode="floor") & mask


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Double, so that a draw has room; the best is 0, so that the tiniest temperature does not overflow."""
    wide = logits.double()
    return (wide - wide.max(-1, keepdim=True).values) / temperature.unsqueeze(-1)


def _counts(top_k: Tensor, num_ids: int) -> Tensor:
    """How many ids ``top_k`` leaves: all of them where it is off."""
    return top_k.masked_fill(top_k <= 0, num_ids).clamp(max=num_ids)


def _last(weights: Tensor, best: Tensor, ids: Tensor, *, counts: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest value that stays, and how many stay, [T, 1]. ``best`` and ``ids`` [T, n]: the largest, sorted.

    ``weights`` [T, V] are theirs. The order of equal ones in ``ids`` does not matter, since their weights are equal.
    """
    is_counted = torch.arange(best.shape[-1], device=best.device) < counts.unsqueeze(-1)
    weights = weights.gather(-1, ids)
    weights = weights / weights[:, :1]  # the best weighs 1: shares of equal ones are met exactly
    cumulated = weights.masked_fill(~is_counted, 0.0).cumsum(-1)
    before, total = functional.pad(cumulated[:, :-1], (1, 0)), cumulated[:, -1:]
    share = shares.unsqueeze(-1)
    stays = is_counted & ((before / total < share) | (share >= 1.0))
    count = stays.sum(-1, keepdim=True).clamp(min=1)
    return best.gather(-1, count - 1), count


def _first_of_equals(values: Tensor, last: Tensor, count: Tensor) -> Tensor:
    """Which ``count`` [T, 1] values stay: all above ``last`` [T, 1], and of its equals the first ones."""
    is_above, is_last = values > last, values == last
    places = count - is_above.sum(-1, keepdim=True)
    return is_above | (is_last & (is_last.cumsum(-1) <= places))


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulated weight exceeds ``uniform`` times all; never an id of weight 0."""
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1:].contiguous()
    found = torch.searchsorted(cumulated, uniform.unsqueeze(-1) * total, right=True)
    last = torch.searchsorted(cumulated, total)  # where the sum is reached: nothing of weight lies behind
    return torch.minimum(found, last).squeeze(-1).clamp(max=weights.shape[-1] - 1)  # weights that are NaN reach nothing
