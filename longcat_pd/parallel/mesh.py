"""The process groups of one instance and this rank's place in them. Knows the layout, no models."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.errors import RankLost
from longcat_pd.parallel.collectives import AxisGroup, Collectives
from longcat_pd.parallel.communicators import APART, SILENT, Communicator, communicator
from longcat_pd.parallel.layout import AxisName, CacheShard, ParallelLayout
from longcat_pd.parallel.line import Line
from longcat_pd.parallel.listening import address_of, deafen, store_server
from longcat_pd.parallel.meeting import Signature, SignedStore, Unsigned, prove
from longcat_pd.parallel.platform import Platform, platform_of
from longcat_pd.parallel.traffic import Traffic
from longcat_pd.progress.steps import Tell, untold

_JUDGED_FIRST_S = 10.0  # also by a driver that is slow, or counts from a little later than the ranks


class Mesh:
    """A layout, a rank in it, one group for each of its axes, and what was exchanged in them.

    ``platform`` and ``device``: what the rank runs on; ``local_rank``: its place on its node, where it has the device of
    that number.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        groups: dict[AxisName, dist.ProcessGroup],
        *,
        platform: Platform,
        local_rank: int = 0,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.platform = platform
        self.device = platform.device(local_rank)
        self.traffic = Traffic()
        self._groups = groups
        self._axes = {
            axis.name: self._axis(axis.name, axis.size)
            for axis in layout.axes
            if axis.name not in SILENT and axis.name not in APART
        }

    @classmethod
    def single(cls, device: str = "cpu") -> Mesh:
        """A world of one rank, without torch.distributed."""
        return cls(ParallelLayout.of(ParallelConfig()), 0, {}, platform=platform_of(device))

    @classmethod
    def join(cls, spec: RankSpec) -> Mesh:
        """Meets the other ranks of the instance; rank 0 serves the rendezvous. A world of one needs nobody.

        Raises:
            RankLost: not all ranks came in time.
        """
        layout, platform = ParallelLayout.of(spec.instance.parallel), platform_of(spec.instance.device)
        if layout.world_size == 1:
            return cls(layout, 0, {}, platform=platform)
        return _join(spec, layout, platform)

    def axis(self, name: AxisName) -> AxisGroup:
        """The group of an axis; of size 1 where the layout does not split along it, or its ranks never talk along it."""
        return self._axes.get(name) or AxisGroup(name, 1, 0, None)

    def warm_up(self, tell: Tell = untold) -> None:
        """Builds every communicator, and every pair of neighbours that send to each other. All ranks call it.

        Before memory is measured or given to a cache: the buffers of communicators and the first use of a pair take some.
        """
        names = [axis.name for axis in self.layout.axes if axis.size > 1]  # in the same order everywhere
        for done, name in enumerate(names):
            tell("warm-up", done, len(names))
            self.axis(name).warm_up()
        self.axis("pp").warm_up_chain()
        for name, owner in APART.items():
            if name in self._groups:
                place = self.layout.coordinate(self.rank, name)
                self.axis(owner).communicator = self.platform.runtime.communicator(self._groups[name], place)
        self.platform.runtime.synchronise()
        if names:
            tell("warm-up", len(names), len(names))

    def through(self, wrap: Callable[[Collectives, int], Collectives]) -> None:
        """See ``AxisGroup.through``; on every axis."""
        for axis in self._axes.values():
            axis.through(wrap)

    @property
    def cache_shard(self) -> CacheShard:
        """The part of a sequence's cache that this rank keeps and sees."""
        return self.layout.cache_shard(self.rank)

    def coordinate(self, name: AxisName) -> int:
        """This rank's place on an axis."""
        return self.layout.coordinate(self.rank, name)

    def leave(self) -> None:
        """Ends the groups."""
        for axis in self._axes.values():
            axis.leave()
        if self.layout.world_size > 1:
            dist.destroy_process_group()

    def _axis(self, name: AxisName, size: int) -> AxisGroup:
        rank, group = self.layout.coordinate(self.rank, name), self._groups.get(name)
        if group is None:
            return AxisGroup(name, size, rank, None)
        ranks = self.layout.group_of(self.rank, name)
        line = Line(axis=name, rank=rank, ranks=ranks, group=group, traffic=self.traffic, device=self.device)
        return AxisGroup(name, size, rank, line, collectives=self.platform.collectives)


def _join(spec: RankSpec, layout: ParallelLayout, platform: Platform) -> Mesh:
    """Raises RankLost, and ConfigError for a key file that cannot be read."""
    signature = Signature.of_file(spec.instance.cluster_key_file)
    store = _meet(spec, layout.world_size, platform, signature)  # held as long as groups are made by way of it
    groups = _make_groups(spec, layout, platform)
    if platform.is_joined_at_once:  # the rendezvous has served too: all ranks are connected with it
        deafen(store.told, f"groups of rank {spec.rank}")
        _prove(spec, layout, groups, signature)
    del store
    return Mesh(layout, spec.rank, groups, platform=platform, local_rank=spec.local_rank)


def _prove(spec: RankSpec, layout: ParallelLayout, groups: dict[AxisName, dist.ProcessGroup], signature: Signature) -> None:
    """Whoever came first to a place in a group has it; it must be a rank. Raises RankLost.

    The group of all ranks comes last: a rank is joined when its own pairs are, its peers may be on their way. Behind this
    all are there, and rank 0 may leave, with whom the rendezvous ends.
    """
    limit = timedelta(seconds=platform_of(spec.instance.device).join_limit_s)
    proven = {group.group_name: (group, layout.group_of(spec.rank, axis)) for axis, group in groups.items()}
    everybody: Any = dist.group.WORLD
    proven[everybody.group_name] = everybody, tuple(range(layout.world_size))
    for number, (group, ranks) in proven.items():  # in the order of the layout, so everywhere the same
        me = ranks.index(spec.rank)
        others = [place for place in range(len(ranks)) if place != me]
        try:
            prove(group, f"{spec.incarnation}/{number}", me, others, signature=signature, limit=limit)
        except RuntimeError as error:
            raise RankLost(f"rank {spec.rank}: group of ranks {', '.join(map(str, ranks))}: {error}") from error


def _make_groups(spec: RankSpec, layout: ParallelLayout, platform: Platform) -> dict[AxisName, dist.ProcessGroup]:
    """This rank's group of each axis; which axes share one, ``communicators.py`` says."""
    # the driver judges a slow step first, once for each heartbeat; a collective gives up only after the driver has
    judged_s = spec.instance.engine.step_timeout_s + spec.instance.engine.rank_lost_s + _JUDGED_FIRST_S
    timeout = timedelta(seconds=max(judged_s, platform.collective_limit_s))
    groups: dict[AxisName, dist.ProcessGroup] = {}
    made: dict[Communicator, dist.ProcessGroup] = {}
    npu = spec.instance.npu
    for axis in layout.axes:  # all ranks make all groups, in the same order
        if axis.size == 1 or axis.name in SILENT:
            continue
        for ranks in layout.groups(axis.name):
            wanted = communicator(axis.name, ranks, npu)
            if wanted not in made:
                asked = platform.runtime.group_options(wanted.options)
                made[wanted] = dist.new_group(list(ranks), timeout=timeout, pg_options=asked)
        groups[axis.name] = made[communicator(axis.name, layout.group_of(spec.rank, axis.name), npu)]
    return groups


def _meet(spec: RankSpec, world_size: int, platform: Platform, signature: Signature) -> Any:
    """Makes the group of all ranks, which computes nothing. Returns the store by way of which others are made.

    Raises RankLost (of RuntimeError are all errors here).
    """
    limit = timedelta(seconds=platform.join_limit_s)
    place, serves = (spec.rendezvous_host, spec.rendezvous_port), spec.rank == 0
    backend, kind = platform.collective_backend, dist.TCPStore  # type: ignore[attr-defined]
    try:
        told: Any = store_server(*place) if serves else {"host_name": place[0], "port": place[1]}
        store: Any = kind(**told, world_size=world_size, is_master=serves, timeout=limit)
        if platform.is_joined_at_once:
            store = SignedStore(store, spec.incarnation, signature=signature, limit=limit)
            store.told += [address_of(told["master_listen_fd"])] if serves else []
        dist.init_process_group(backend, store=store, rank=spec.rank, world_size=world_size, timeout=limit)
    except Unsigned as error:
        raise RankLost(f"rank {spec.rank}: {error}") from error
    except (OSError, RuntimeError) as error:
        text = (
            f"not all {world_size} ranks came to the rendezvous at {place[0]}:{place[1]} within {platform.join_limit_s:g} s"
        )
        raise RankLost(f"rank {spec.rank}: {text}") from error
    return store
