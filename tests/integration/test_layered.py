"""The hand-over is layered for real: most bytes have left when prefill's last layer ends."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from longcat_pd.config import resolve
from longcat_pd.config.schema import PeerAddress
from tests.parity.conftest import MakeCheckpoint
from tests.topology import CHUNK, Topology, cluster_file, pools

PROMPT = list(range(100, 100 + 4 * CHUNK))
WANTED, MOST_TRIES = 0.8, 30  # a busy machine holds a lane up now and then


async def sent(topology: Topology, peer: PeerAddress) -> tuple[float, float]:
    """Bytes that the prefill instance has sent, and those that left early."""
    text = (await topology.client.get(f"http://{peer.host}:{peer.http_port}/metrics")).text
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    return values["longcat_pd_transfer_bytes_total"], values["longcat_pd_transfer_early_bytes_total"]


async def test_four_fifths_of_the_bytes_leave_before_the_last_layer_ends(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    path = cluster_file(
        tmp_path, tiny("2.0"), prefill={"pp_size": 2, "cp_size": 2}, decode={"kvp_size": 2, "attn_tp_size": 2}
    )
    config = resolve.load(path, ["model.dtype=float32"])
    (prefill,) = resolve.instance_spec(config, "d0").peers
    shares = []
    async with pools(config) as topology:
        before = await sent(topology, prefill)
        for number in range(MOST_TRIES):
            await topology.complete([number, *PROMPT[1:]], max_tokens=2)
            await topology.idle_within()  # P's share of the end may come behind the answer
            after = await sent(topology, prefill)
            num_bytes, num_early = after[0] - before[0], after[1] - before[1]
            entries = topology.parts["p0"].hello.cache_entries
            payload = sum(width * 4 * len(PROMPT) for _, width, _ in entries)
            assert payload < num_bytes < 1.05 * payload, "every block once, and its headers"
            shares.append(num_early / num_bytes)
            before = after
            if shares[-1] >= WANTED:
                break
    assert shares[-1] >= WANTED, shares
