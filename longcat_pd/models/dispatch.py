"""Rows on their way to the ranks that have their experts, and the sums of results on their way back.

Pairs of ``dispatch`` and ``combine`` that stand for each other: what lies between them computes the experts of this rank
for whatever rows it is given. Every rank of an instance's stage calls them alike, also without rows. Experts without
weights never travel: whoever hands a row in adds them. Knows no weights of experts and no layer.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.errors import ConfigError
from longcat_pd.kernels.expert_ops import ExpertGroup
from longcat_pd.models.batch import Rows
from longcat_pd.models.context import ModelContext
from longcat_pd.models.dispatched import Dispatched, FusedParcels, Parcels, Route, Routing
from longcat_pd.models.rows import RowExchange, Shares
from longcat_pd.parallel.collectives import AxisGroup


class ExpertDispatch(Protocol):
    """One way to bring rows to experts. ``rows`` says what is handed in."""

    def take(self, stream: Tensor, rows: Rows) -> Tensor:
        """The rows of the stream that this rank hands in."""
        ...

    def dispatch(self, x: Tensor, route: Route, rows: Rows) -> Dispatched:
        """The rows [n, hidden] that this rank handed in go to the experts that ``route`` chooses for them."""
        ...

    def combine(self, y: Tensor, sent: Dispatched, rows: Rows) -> Tensor:
        """Sums over the routed experts of every row handed in, [n, hidden], in the type of ``y``.

        ``y`` [N, hidden] has the weighted sums over this rank's experts of every row of ``sent``.
        """
        ...

    def give(self, out: Tensor, rows: Rows) -> Tensor:
        """The stream of what every rank has for the rows that it handed in."""
        ...


def make_dispatch(context: ModelContext, *, is_int8: bool) -> ExpertDispatch:
    """The pair for a layout and the way that was asked for. ``is_int8``: the experts are."""
    mesh, num_experts = context.mesh, context.config.n_routed_experts
    ep, moe_tp, same = mesh.axis("ep"), mesh.axis("moe_tp"), mesh.axis("attn_tp")
    assert ep.size == 1 or moe_tp.size == 1, (ep.size, moe_tp.size)
    if ep.size == 1:
        return WholeExperts(RowExchange(moe_tp, same))
    if context.moe_dispatch == "two_level":
        return TwoLevel(mesh.axis("node"), mesh.axis("local"), same=same, num_experts=num_experts)
    if context.moe_dispatch == "fused":
        return Fused(context, ep, same, is_int8=is_int8)
    kinds: dict[str, type[Gathered] | type[AllToAll]] = {"gather": Gathered, "all_to_all": AllToAll}
    return kinds[context.moe_dispatch](ep, same, num_experts)


class WholeExperts:
    """All experts are here: whole, or of each a part of its inner width, as ``moe_tp`` says."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange

    def take(self, stream: Tensor, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return stream

    def dispatch(self, x: Tensor, route: Route, rows: Rows) -> Dispatched:
        """See ExpertDispatch."""
        own = Routing(*route(x))
        if self._exchange.group.size == 1 or not self._exchange.meets(rows):
            return Dispatched(x, own, own)
        everyones = self._exchange.spread(_packed(own), rows)
        return Dispatched(self._exchange.spread(x, rows), _unpacked(everyones), own)

    def combine(self, y: Tensor, sent: Dispatched, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return self._exchange.total(y, rows)

    def give(self, out: Tensor, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return out


class _ByShares:
    """Every rank hands in its share of rows, so that none is computed twice."""

    def __init__(self, same: AxisGroup) -> None:
        self._shares = Shares(same)

    def take(self, stream: Tensor, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return self._shares.hand_in(stream, rows)

    def give(self, out: Tensor, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return self._shares.give(out, rows)


class Gathered(_ByShares):
    """Every rank gets all rows and computes its experts for them. All shapes are static."""

    def __init__(self, group: AxisGroup, same: AxisGroup, num_experts: int) -> None:
        super().__init__(same)
        self._group = group
        self._num_here = num_experts // group.size

    def dispatch(self, x: Tensor, route: Route, rows: Rows) -> Dispatched:
        """See ExpertDispatch. A missing row is nobody's."""
        own = Routing(*route(x))
        num_real = self._shares.num_real(rows)
        nobody = functional.pad(own.expert_ids[:num_real], (0, 0, 0, len(x) - num_real), value=-1)
        everyones = _unpacked(self._group.all_gather(_packed(Routing(nobody, own.weights))))
        ids = _numbered(everyones.expert_ids, self._group.rank, self._num_here)
        return Dispatched(self._group.all_gather(x), Routing(ids, everyones.weights), own)

    def combine(self, y: Tensor, sent: Dispatched, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return self._group.reduce_scatter(y)


class AllToAll(_ByShares):
    """A row goes to the ranks of its experts, once for each, and no further. Counts are exchanged; nothing is padded."""

    def __init__(self, group: AxisGroup, same: AxisGroup, num_experts: int) -> None:
        super().__init__(same)
        self._courier = _Courier(group, num_experts)

    def dispatch(self, x: Tensor, route: Route, rows: Rows) -> Dispatched:
        """See ExpertDispatch."""
        own = Routing(*route(x))
        num_real = self._shares.num_real(rows)
        return self._courier.dispatch(x, Routing(*(part[:num_real] for part in own)), own)

    def combine(self, y: Tensor, sent: Dispatched, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return self._courier.combine(y, sent)


class TwoLevel(_ByShares):
    """For nodes that are joined by slower links than ranks inside them.

    A row goes to each other node once, as it is, to the rank at the same place there; every node routes it to those of its
    own ranks that have experts of it, and one sum comes back from each.
    """

    def __init__(self, node: AxisGroup, local: AxisGroup, *, same: AxisGroup, num_experts: int) -> None:
        super().__init__(same)
        self._node = node
        self._num_here = num_experts // node.size
        self._courier = _Courier(local, self._num_here)

    def dispatch(self, x: Tensor, route: Route, rows: Rows) -> Dispatched:
        """See ExpertDispatch."""
        counts = self._node.all_gather(torch.tensor([self._shares.num_real(rows)], dtype=torch.int32, device=x.device))
        everyones = self._node.all_gather(x)
        routing = Routing(*route(everyones))
        place = torch.arange(len(x), device=x.device)
        is_missing = (place.unsqueeze(0) >= counts.unsqueeze(1)).flatten()
        ids = _numbered(routing.expert_ids, self._node.rank, self._num_here)
        ids = ids.masked_fill(is_missing.unsqueeze(1), self._num_here)
        mine = slice(self._node.rank * len(x), (self._node.rank + 1) * len(x))
        own = Routing(routing.expert_ids[mine], routing.weights[mine])
        return self._courier.dispatch(everyones, Routing(ids, routing.weights), own)

    def combine(self, y: Tensor, sent: Dispatched, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        return self._node.reduce_scatter(self._courier.combine(y, sent))


class Fused(_ByShares):
    """Rows travel inside two operators of the device, by expert; experts without weights are copies that these know of.

    All shapes are static, and counts never come to the host.
    """

    def __init__(self, context: ModelContext, group: AxisGroup, same: AxisGroup, *, is_int8: bool) -> None:
        super().__init__(same)
        config, ops = context.config, context.ops
        if ops.moe_dispatch is None or ops.moe_combine is None:
            text = "parallel.moe_dispatch=fused: the operators of this device lack the fused pair; use gather"
            raise ConfigError(text, param="parallel.moe_dispatch")
        self._dispatch, self._combine = ops.moe_dispatch, ops.moe_combine
        is_copy = config.zero_expert_num > 0 and config.zero_expert_type == "identity"
        self._group = ExpertGroup(
            communicator=group.communicator,
            size=group.size,
            rank=group.rank,
            num_experts=config.n_routed_experts,
            num_copies=config.zero_expert_num if is_copy else 0,
        )
        if config.zero_expert_num and not is_copy:
            text = f"parallel.moe_dispatch=fused: knows no zero_expert_type {config.zero_expert_type}; use gather"
            raise ConfigError(text, param="parallel.moe_dispatch")
        self._is_int8 = is_int8

    def dispatch(self, x: Tensor, route: Route, rows: Rows) -> Dispatched:
        """See ExpertDispatch."""
        own = Routing(*route(x))
        num_real = self._shares.num_real(rows)
        is_real = torch.arange(len(x), device=x.device) < num_real if num_real < len(x) else None
        sent = self._dispatch(
            x, own.expert_ids, weights=own.weights, is_real=is_real, group=self._group, is_int8=self._is_int8
        )
        return Dispatched(sent.x, own, own, FusedParcels(sent, x, is_real), has_copies=True)

    def combine(self, y: Tensor, sent: Dispatched, rows: Rows) -> Tensor:
        """See ExpertDispatch."""
        parcels = sent.handle
        assert isinstance(parcels, FusedParcels), "what was dispatched by another pair"
        return self._combine(
            y,
            parcels.sent,
            x=parcels.x,
            expert_ids=sent.own.expert_ids,
            weights=sent.own.weights,
            is_real=parcels.is_real,
            group=self._group,
        )


class _Courier:
    """Rows to the ranks of one group that have their experts, and their results back to be weighted and added.

    A row's results are added where they are wanted, in the order of experts, as one rank that has all of them does.
    """

    def __init__(self, group: AxisGroup, num_experts: int) -> None:
        self._group = group
        self._num_experts = num_experts
        self._num_here = num_experts // group.size

    def dispatch(self, x: Tensor, routing: Routing, own: Routing) -> Dispatched:
        """The rows of ``x`` that ``routing`` knows: its ids are numbers among the experts of the group."""
        topk = routing.expert_ids.shape[1]
        sorted_ids, order = routing.expert_ids.flatten().sort(stable=True)
        counts = torch.bincount(sorted_ids, minlength=self._num_experts)[: self._num_experts]
        order = order[: int(counts.sum())]
        by_expert = counts.int().view(self._group.size, self._num_here)
        coming = self._group.all_to_all(by_expert)
        out, into = by_expert.sum(1).tolist(), coming.sum(1).tolist()
        rows = order // topk
        received = self._group.all_to_all_rows(x[rows], out, into)
        numbers = torch.arange(self._num_here, device=x.device).repeat(self._group.size)
        ids = numbers.repeat_interleave(coming.flatten().long(), output_size=len(received)).unsqueeze(1)
        once = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
        parcels = Parcels(rows, routing.weights.flatten()[order], len(x), x.dtype, out, into)
        return Dispatched(received, Routing(ids, once), own, parcels)

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """Sums over the experts of the group for all rows of ``x``, in the type of ``y``."""
        parcels = sent.handle
        assert isinstance(parcels, Parcels), "what was dispatched by another pair"
        back = self._group.all_to_all_rows(y.to(parcels.dtype), parcels.into, parcels.out)  # an expert's result is of it
        total = y.new_zeros((parcels.num_rows, y.shape[1]))
        return total.index_add_(0, parcels.rows, back.to(y.dtype) * parcels.weights.unsqueeze(-1))


def _numbered(expert_ids: Tensor, rank: int, num_here: int) -> Tensor:
    """Numbers among the ``num_here`` experts of the rank; of all others ``num_here``."""
    numbers = expert_ids - rank * num_here
    return torch.where((numbers >= 0) & (numbers < num_here), numbers, num_here)


def _packed(routing: Routing) -> Tensor:
    """As one tensor [rows, 2 topk] int32, for one exchange."""
    return torch.cat((routing.expert_ids.int(), routing.weights.view(torch.int32)), 1)


def _unpacked(packed: Tensor) -> Routing:
    ids, weights = packed.chunk(2, 1)
    return Routing(ids.long(), weights.contiguous().view(torch.float32))
