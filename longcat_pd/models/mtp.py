"""The draft layer of multi-token prediction: from a final hidden state and the token behind it to the next hidden state.

One dense layer with its own cache entries, applied once for each draft. Knows neither when to draft nor what becomes of
the drafts; logits come from the target's head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longcat_pd.config.model import attentions_of
from longcat_pd.models.attention import Attention
from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.context import ModelContext
from longcat_pd.models.embedding import VocabEmbedding
from longcat_pd.models.kv_access import make_kv_access
from longcat_pd.models.linear import GatedMlp, Linear, Piece, RmsNorm
from longcat_pd.models.rope import RotaryPositions
from longcat_pd.models.tensor_names import DRAFT_EMBEDDING
from longcat_pd.models.weight_spec import WeightSpec


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the rows of a draft round attend to (see ``KVAccess.select``); None: all that is visible."""

    keys: Tensor | None


class DraftLayer(nn.Module):
    """Row i pairs the final hidden state of position i with token i + 1 and predicts token i + 2; it stands at position i.

    It is layer number ``num_layers`` with one attention. All steps of a round share the keys that the first one chose,
    each with its own position added, where the checkpoint says so; else every step chooses.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config, name = context.config, "model.mtp.layers.0"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        (number,) = attentions_of(config, config.num_layers)
        self._shares_keys = config.draft is None or config.draft.dsa_mtp_cli
        self._rotary = RotaryPositions(context)
        self.word = VocabEmbedding(context, DRAFT_EMBEDDING)
        self.token_norm = RmsNorm(context, f"{name}.enorm.m", width=hidden, eps=eps)
        self.hidden_norm = RmsNorm(context, f"{name}.hnorm.m", width=hidden, eps=eps)
        self.join = Linear(context, 2 * hidden, Piece(f"{name}.eh_proj", hidden))
        self.input_norm = RmsNorm(context, f"{name}.input_layernorm", width=hidden, eps=eps)
        self.attention = Attention(context, number, name=f"{name}.self_attn", kv_access=make_kv_access(context))
        self.post_norm = RmsNorm(context, f"{name}.post_attention_layernorm", width=hidden, eps=eps)
        self.mlp = GatedMlp(context, f"{name}.transformer_layer.mlp", width=config.ffn_hidden_size)
        self.norm = RmsNorm(context, "model.mtp.norm", width=hidden, eps=eps)

    def forward(self, final: Tensor, inputs: ForwardInputs, chosen: Chosen | None) -> tuple[Tensor, Chosen]:
        """The stream [T, hidden] of final hidden states -> that behind the own norm, and keys for the next steps."""
        x, rotation = self._joined(final, inputs), self._rotary(inputs.positions)
        h = self.input_norm(x)
        if chosen is not None and self._shares_keys:
            attended, keys = self.attention.reuse(h, rotation, inputs=inputs, keys=chosen.keys)
        else:
            attended, keys = self.attention(h, rotation, inputs=inputs, keys=None)
        end, h = self.post_norm.after(x, attended)
        out: Tensor = self.norm(end + self.mlp(h, inputs.rows))
        return out, Chosen(keys)

    def write(self, final: Tensor, inputs: ForwardInputs) -> None:
        """Only the cache entries of the rows: one layer's entries do not depend on what its rows attend to."""
        h = self.input_norm(self._joined(final, inputs))
        self.attention.write(h, self._rotary(inputs.positions), inputs=inputs)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """All tensors of the draft layer."""
        norms = (self.token_norm, self.hidden_norm, self.input_norm, self.post_norm, self.norm)
        for module in (self.word, self.join, self.attention, self.mlp, *norms):
            yield from module.weight_specs()

    def _joined(self, final: Tensor, inputs: ForwardInputs) -> Tensor:
        assert inputs.next_token_ids is not None, "the draft layer reads the tokens behind its rows"
        token = self.token_norm(self.word(inputs.next_token_ids, inputs.rows))
        joined: Tensor = self.join(torch.cat((token, self.hidden_norm(final)), -1))
        return joined
