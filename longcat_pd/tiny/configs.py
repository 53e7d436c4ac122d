"""The ``config.json`` of each small checkpoint, under the field names of its release, with all proportions shrunk.

Owns the sizes and the rule for overrides. Sizes are chosen so that every feature acts within a few dozen tokens, head
counts divide by 1, 2, 3 and 4, and the number of n-gram tables divides the hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from longcat_pd.errors import ConfigError

VARIANTS = ("2.0", "lite-sparse", "lite", "chat")

_COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 96,
    "num_layers": 3,
    "num_attention_heads": 12,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 16,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "moe_topk": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_method": "MLA",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

_SPARSE: dict[str, Any] = {
    "architectures": ["LongcatCausalLM"],
    "rope_scaling": {
        "rope_type": "deepseek_yarn",
        "factor": 32,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1,
        "mscale_all_dim": 1,
    },
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 48,
    "index_init_tokens": 4,
    "index_local_tokens": 16,
    "index_k_norm_type": "rms",
    "cli_factor": 2,
    "mtp_num_layers": 3,
    "mtp_replicate_modules": True,
    "mtp_disable_over_tokenizer": True,
    "dsa_mtp_cli": True,
    "use_mla": 1,
    "use_cache": True,
}

_VARIANTS: dict[str, dict[str, Any]] = {
    # 2.567 * 1024 = 2628.6: rounding instead of flooring gives other tables.
    "2.0": _COMMON
    | _SPARSE
    | {
        "oe_vocab_size_ratio": 2.567,
        "oe_neighbor_num": 5,
        "oe_split_num": 4,
        "moe_impl": "mix",
        "moe_switch_token_num": 1024,
    },
    "lite-sparse": _COMMON
    | _SPARSE
    | {
        "index_n_heads": 2,
        "n_routed_experts": 12,
        "zero_expert_num": 6,
        "oe_vocab_size_ratio": 2,
        "oe_neighbor_num": 4,
        "oe_split_num": 4,
        "attention_method": "LSA",
    },
    "lite": _COMMON
    | {
        "architectures": ["LongcatFlashNgramForCausalLM"],
        "model_type": "longcat_flash_ngram",
        "n_routed_experts": 12,
        "zero_expert_num": 6,
        "rope_theta": 5000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1,
            "mscale_all_dim": 1,
        },
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 4,
        "emb_split_num": 4,
    },
    "chat": _COMMON
    | {
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "use_cache": True,
    },
}

# Fields that a release does not write but a reader understands.
_OPTIONAL_FIELDS = frozenset(
    {
        "norm_topk_prob",
        "indexer_rope_interleave",
        "index_k_norm_eps",
        "lora_norm_eps",
        "ignored_token_ids",
        "text_vocab_size",
    }
)

GENERATION_CONFIG: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


def make_config(variant: str, overrides: Iterable[str], *, dtype: str) -> dict[str, Any]:
    """The variant's ``config.json`` with ``overrides`` laid over it.

    An override is ``key=value``; dots lead into nested records; the value is JSON, or text if it is not JSON; ``null``
    removes the key. Raises ConfigError for a key that no variant has.
    """
    config: dict[str, Any] = json.loads(json.dumps(_VARIANTS[variant]))
    config["torch_dtype"] = dtype
    known = _OPTIONAL_FIELDS.union(config, *_VARIANTS.values())
    for override in overrides:
        key, separator, text = override.partition("=")
        *parents, last = key.split(".")
        if not separator or (parents or [last])[0] not in known:
            raise ConfigError(f"override {override!r}: expected KEY=VALUE with a key of config.json", param=key)
        record = config
        for parent in parents:
            record = record.setdefault(parent, {})
        if text == "null":
            record.pop(last, None)
        else:
            record[last] = _parse(text)
    return config


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
