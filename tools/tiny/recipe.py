"""The recipe of the trained checkpoint: its ``config.json``, what it is fed, and how fast it learns. Read this file first.

Other numbers stand beside what they are of: how a weight begins in the twin's modules, how often a skill says what in the
skill's.

**Model.** LongCat-2.0 in small: every feature is on, with proportions that make it act within a few dozen tokens. 16 n-gram
tables; two shortcut layers of two attentions, two dense MLPs and one mixture of 16 experts and 4 identity experts; an
indexer for each pair of attentions that keeps 64 keys (4 first, 24 last, 36 chosen) of contexts up to ten times as long;
YaRN, whose angles hold at every position, though no document is longer than the 1,024 that it stretches; one draft layer
for three drafts. 2.9 million parameters.

**Diet.** Nothing but what the scripts in this folder make: questions about this project, small talk, sums, stories with
pairs to recall, tool calls, short reasoning. Loss is taken on answers alone. At first all documents are random
sequences said twice: the heads that copy ("what stood behind this token before?") form on them, and recall, sums that
repeat their numbers and arguments of calls stand on those. They begin with 2 to 4 tokens and grow while copying holds:
to copy from a short text is learnt at once, then to find the place in a longer one. Stories begin with one pair and grow
while recall holds. Several pairs of a story are asked, one after the other: 400 tokens that are read once teach more so.

**First weights.** Two things decide whether copying is learnt in a quarter of a million tokens or not in ten times as many
(``Twin``): the head begins as the embedding, and all words have a part in common. The family has no biases, so without that
part a head has nothing to look at mere places with, such as the one before. And a piece of a word with a space before it
begins nearly as the one without, since to say again is often to say it at the beginning: "Tell Bea" and then "Bea".

**Optimizer.** Muon for the matrices (orthogonalized momentum, as in torch.optim), AdamW for embeddings, tables, experts,
indexers and norms.

**Losses.** Cross-entropy of the next token, of three drafts as a draft round computes them, and for each indexer the
divergence between what its pair of attentions looks at and what it would choose. That one has no gradient into anything but
the indexer. At first only one attention of the target sees all keys, the first of the last layer; the others see the first
and the last ones, which are never left out. So the head that finds a place far away forms where the indexer has what it
needs: what stood before each token. Left alone, the two attentions of the first layer form it, and their one indexer reads
what comes into the first of them: of stories with 40 pairs it missed the wanted one in every third to every second.
Later all see the chosen keys alone, as in service.
The router's choice bias follows the load: an expert with less than its share becomes more likely (arXiv:2408.15664).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 1792
LONGEST = 640  # tokens of a document
NUM_DRAFTS = 3

CONFIG: dict[str, Any] = {
    "architectures": ["LongcatCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_layers": 2,
    "num_attention_heads": 8,
    "ffn_hidden_size": 256,
    "expert_ffn_hidden_size": 48,
    "n_routed_experts": 16,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "moe_topk": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "deepseek_yarn",
        "factor": 4,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1,
        "mscale_all_dim": 1,
    },
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_method": "MLA",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "index_init_tokens": 4,
    "index_local_tokens": 24,
    "index_k_norm_type": "rms",
    "cli_factor": 2,
    "mtp_num_layers": 3,
    "mtp_replicate_modules": True,
    "mtp_disable_over_tokenizer": True,
    "dsa_mtp_cli": True,
    "use_mla": 1,
    "use_cache": True,
    "oe_vocab_size_ratio": 2.567,
    "oe_neighbor_num": 5,
    "oe_split_num": 4,
    "moe_impl": "mix",
    "moe_switch_token_num": 1024,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Numbers of a training. Times are steps of the optimizer."""

    seed: int = 0
    steps: int = 7200
    pool: int = 128  # documents drawn at a time, and sorted by length into batches
    tokens_per_step: int = 3072  # padded, of a batch; one batch is a step
    learning_rate: float = 1.5e-3
    muon_factor: float = 2.0  # its rate, as a multiple of the other's
    final_rate: float = 0.02  # the last step's rate, as a part of the first's; a cosine between
    second_from: int = 4700  # the rate has come down; it begins again at ``second_rate`` of the first's, and so on
    second_rate: float = 0.35
    third_from: int = 6400
    third_rate: float = 0.3
    warmup_steps: int = 50
    betas: tuple[float, float] = (0.9, 0.97)  # of AdamW
    epsilon: float = 1e-9
    weight_decay: float = 0.02
    clip: float = 1.0
    draft_weight: float = 0.3  # of the mean loss of the three drafts
    index_weight: float = 0.3
    index_others: int = 32  # rows of a document, beside those of answers, from which indexers learn
    index_others_weight: float = 0.1  # of one of these, where one of an answer has 1
    index_from: int = 225  # the step from which indexers learn
    sparse_from: int = 1125  # from here on attention sees the chosen keys alone
    balance_rate: float = 5e-4  # how far the router's bias goes a step
    late_from: int = 1200  # from when the second of SHARES holds; the others do from ``second_from`` and ``third_from``
    copies_alone: int = 48  # until copies have so many tokens, there is nothing else
    copy_share_later: float = 0.06  # of documents, from then on
    copy_holds: float = 0.75  # of the tokens of a second half, guessed right
    recall_holds: float = 0.8  # of the answers to stories, right as a whole
    first_copy: int = 4  # tokens of the longest copied sequence
    last_copy: int = 192
    first_pairs: int = 1  # of the longest story
    last_pairs: int = 48


# Of the documents that are not copied sequences: how often each skill is drawn, first, from ``late_from``, and in the
# second and third round. Wordings are learnt soon, and so is recall, whose documents are ten times as long as sums; sums
# and calls take many examples. Who has learnt a few dozen openers by heart takes a new one for something else: so at last
# the many ways to say them (``openers``).
SHARES = (
    {"facts": 0.26, "smalltalk": 0.12, "arithmetic": 0.22, "recall": 0.22, "calling": 0.10, "thinking": 0.08},
    {"facts": 0.15, "smalltalk": 0.11, "arithmetic": 0.32, "recall": 0.14, "calling": 0.16, "thinking": 0.12},
    {"facts": 0.11, "smalltalk": 0.10, "arithmetic": 0.27, "recall": 0.06, "calling": 0.28, "thinking": 0.18},
    {
        "facts": 0.14,
        "smalltalk": 0.14,
        "arithmetic": 0.20,
        "recall": 0.06,
        "calling": 0.18,
        "thinking": 0.14,
        "openers": 0.14,
    },
)
