"""Small checkpoints with the widths that device operators are made for: few layers, heads and experts of full size."""

from __future__ import annotations

COMMON = (
    "hidden_size=1024",
    "num_layers=2",
    "num_attention_heads=4",
    "ffn_hidden_size=128",
    "expert_ffn_hidden_size=64",
    "n_routed_experts=8",
    "zero_expert_num=4",
    "q_lora_rank=1536",
    "kv_lora_rank=512",
    "qk_nope_head_dim=128",
    "qk_rope_head_dim=64",
    "v_head_dim=128",
)
SPARSE = (*COMMON, "index_head_dim=128")
WIDTHS = {  # the number of n-gram tables divides the hidden size
    "2.0": SPARSE,
    "lite-sparse": (*SPARSE, "oe_neighbor_num=3"),
    "lite": (*COMMON, "emb_neighbor_num=3"),
    "chat": COMMON,
}
BLOCK = 16  # the smallest that device operators take
