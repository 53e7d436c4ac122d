"""How the ranks of an instance meet: the rendezvous, the group of all, one group for each axis, and that all are there.

Rank 0 serves the rendezvous. Knows layouts and platforms; what is exchanged in the groups is others' matter.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from longcat_pd.config.schema import RankSpec
from longcat_pd.errors import RankLost
from longcat_pd.parallel.communicators import SILENT, Communicator, communicator
from longcat_pd.parallel.layout import AxisName, ParallelLayout
from longcat_pd.parallel.listening import address_of, deafen, store_server
from longcat_pd.parallel.meeting import Signature, SignedStore, Unsigned, prove
from longcat_pd.parallel.platform import Platform

_JUDGED_FIRST_S = 10.0  # also by a driver that is slow, or counts from a little later than the ranks


def join_groups(spec: RankSpec, layout: ParallelLayout, platform: Platform) -> dict[AxisName, dist.ProcessGroup]:
    """This rank's group of each axis, in a world of two ranks or more, once all ranks are there.

    Raises:
        RankLost: not all ranks came in time, or who came did not have the cluster's key.
        ConfigError: a key file that cannot be read.
    """
    signature = Signature.of_file(spec.instance.cluster_key_file)
    store = _meet(spec, layout.world_size, platform, signature)  # held as long as groups are made by way of it
    groups = _make_groups(spec, layout, platform)
    if platform.is_joined_at_once:  # the rendezvous has served too: all ranks are connected with it
        deafen(store.told, f"groups of rank {spec.rank}")
        _prove(spec, layout, groups, signature=signature, limit=timedelta(seconds=platform.join_limit_s))
    del store
    return groups


def _prove(
    spec: RankSpec,
    layout: ParallelLayout,
    groups: dict[AxisName, dist.ProcessGroup],
    *,
    signature: Signature,
    limit: timedelta,
) -> None:
    """Whoever came first to a place in a group has it; it must be a rank. Raises RankLost.

    The group of all ranks comes last: a rank is joined when its own pairs are, its peers may be on their way. Behind this
    all are there, and rank 0 may leave, with whom the rendezvous ends.
    """
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
