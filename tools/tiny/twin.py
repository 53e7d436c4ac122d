"""The training twin of the model: the whole of it with its draft layer, over right-padded sequences.

``hidden`` gives what the head reads, ``Twin.drafts`` what it reads for each draft. Tensors leave and enter under the names
of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from longcat_pd.config.model import ModelConfig
from tools.tiny.twin_attention import Attention, Shared, at, looks
from tools.tiny.twin_parts import Matrix, Mixture, Mlp, NgramEmbedding, Norm, Pass


class Layer(nn.Module):
    """Two attentions, two dense MLPs, and a mixture that joins at the end."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        name, hidden, eps = f"model.layers.{number}", config.hidden_size, config.rms_norm_eps
        gain = (4 * config.num_layers) ** -0.5
        self.before = nn.ModuleList(Norm(f"{name}.input_layernorm.{j}", hidden, eps) for j in (0, 1))
        self.behind = nn.ModuleList(Norm(f"{name}.post_attention_layernorm.{j}", hidden, eps) for j in (0, 1))
        self.attentions = nn.ModuleList(
            Attention(
                config,
                f"{name}.self_attn.{j}",
                owns_index=config.owns_index(2 * number + j),
                looks_far=(number, j) == (config.num_layers - 1, 0),
                gain=gain,
            )
            for j in (0, 1)
        )
        self.mlps = nn.ModuleList(Mlp(f"{name}.mlps.{j}", hidden, config.ffn_hidden_size, gain=gain) for j in (0, 1))
        self.mixture = Mixture(config, f"{name}.mlp", gain=gain)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        """[B, T, hidden] -> the same."""
        shared, joined = Shared(), torch.zeros(())
        for j in (0, 1):
            x = x + self.attentions[j](self.before[j](x), now, shared)
            h = self.behind[j](x)
            if j == 0:
                joined = self.mixture(h.flatten(0, 1)).view_as(h)
            x = x + self.mlps[j](h)
        return x + joined


class Draft(nn.Module):
    """The draft layer: three rounds, each row of a round from the row before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        name, hidden, eps = "model.mtp.layers.0", config.hidden_size, config.rms_norm_eps
        self.config = config
        self.word = nn.Parameter(torch.randn(config.vocab_size, hidden) * 0.5)
        self.token_norm = Norm(f"{name}.enorm.m", hidden, eps)
        self.hidden_norm = Norm(f"{name}.hnorm.m", hidden, eps)
        self.join = Matrix(f"{name}.eh_proj", 2 * hidden, hidden)
        self.before = Norm(f"{name}.input_layernorm", hidden, eps)
        self.attention = Attention(config, f"{name}.self_attn", owns_index=True, looks_far=True, gain=0.5)
        self.behind = Norm(f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp = Mlp(f"{name}.transformer_layer.mlp", hidden, config.ffn_hidden_size, gain=0.5)
        self.norm = Norm("model.mtp.norm", hidden, eps)

    def forward(self, final: Tensor, ids: Tensor, rows: Tensor, now: Pass) -> list[Tensor]:
        """What the head reads for three drafts, each [B, R, hidden].

        ``final`` [B, T, hidden] of the target, ``ids`` [B, T]. ``rows`` [B, R] are positions where a round begins: the
        target has computed position i and said token i + 1; drafts are of tokens i + 2, i + 3 and i + 4.
        """
        attention, scale = self.attention, self.config.softmax_scale
        behind = functional.pad(ids, (0, 3))
        x = self._joined(behind[:, 1 : ids.shape[1] + 1], final)
        h = self.before(x)
        keys, values = attention.keys_values(h, now.rotation)
        visible = torch.arange(ids.shape[1]) <= rows.unsqueeze(-1)  # [B, R, T]
        if attention.must_choose(ids.shape[1]):
            visible = self._choose(h, keys, rows, now)
        x, outs = at(x, rows), list[Tensor]()
        own_keys, own_values = list[Tensor](), list[Tensor]()
        for step in range(3):
            rotation = now.rotation[rows + step]
            if step:
                x = self._joined(behind.gather(1, rows + 1 + step), outs[-1])
                k, v = attention.keys_values(self.before(x), rotation)
                own_keys.append(k)
                own_values.append(v)
            q = attention.queries(attention.latent(self.before(x)), rotation)
            scores = (q @ keys.mT).masked_fill(~visible.unsqueeze(1), -torch.inf)
            near = [(q * k).sum(-1, keepdim=True) for k in own_keys]
            looks = (torch.cat([scores, *near], -1) * scale).softmax(-1)
            attended = looks[..., : ids.shape[1]] @ values
            for n, v in enumerate(own_values):
                attended = attended + looks[..., ids.shape[1] + n, None] * v
            y = x + attention.out(attended)
            outs.append(self.norm(y + self.mlp(self.behind(y))))
        return outs

    def _choose(self, h: Tensor, keys: Tensor, rows: Tensor, now: Pass) -> Tensor:
        """What rows may look at, [B, R, T]; the rows of drafts alone teach this indexer."""
        attention, indexer = self.attention, self.attention.indexer
        assert indexer is not None
        latent, visible = attention.latent(h), torch.arange(h.shape[1]) <= rows.unsqueeze(-1)
        if now.watched is not None:
            q = attention.queries(at(latent, rows), now.rotation[rows])
            looked = looks(q, keys, visible, scale=self.config.softmax_scale)
            scores = indexer(h.detach(), latent.detach(), rows, now.rotation)
            now.index_losses.append(indexer.divergence(looked, scores, rows, torch.ones(rows.shape)))
        return indexer.choose(h, latent, rows, now.rotation) if now.is_sparse else visible

    def _joined(self, ids: Tensor, hidden: Tensor) -> Tensor:
        token = self.token_norm(functional.embedding(ids, self.word))
        joined: Tensor = self.join(torch.cat((token, self.hidden_norm(hidden)), -1))
        return joined


class Twin(nn.Module):
    """Target, draft layer and head. Sequences have at most ``longest`` tokens.

    ``alike``: ids whose words begin as almost that of another id, and one difference that is the same for all of them.
    """

    def __init__(self, config: ModelConfig, *, longest: int, alike: Mapping[int, int] | None = None) -> None:
        super().__init__()
        assert config.over_embedding is not None and config.draft is not None
        self.config = config
        self.embedding = NgramEmbedding(config, config.over_embedding)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.norm = Norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = Matrix("lm_head", config.hidden_size, config.vocab_size)
        self.draft = Draft(config)
        with torch.no_grad():
            # What is read is said alike at first: to copy a token is then one linear map for all of them. And all words
            # have a part in common, which stands in for the biases that the model lacks: by it a head can look at places.
            word = self.embedding.word
            if alike:
                ids, others = torch.tensor(list(alike)), torch.tensor(list(alike.values()))
                word[ids] = 0.8 * word[others] + 0.6 * word[ids] + torch.randn(config.hidden_size) * 0.5
            self.head.weight.copy_(word * 2 / math.sqrt(config.hidden_size))
            word.add_(torch.randn(config.hidden_size) * 0.5)
            self.draft.word.copy_(word)
        angles = torch.arange(longest + 4, dtype=torch.float64)[:, None] * torch.tensor(config.rope_frequencies).double()
        rotation = torch.polar(torch.full_like(angles, config.rope_magnitude), angles).to(torch.complex64)
        self.register_buffer("rotation", rotation, persistent=False)

    def begin(self, ids: Tensor, *, is_sparse: bool, watched: Tensor | None = None, weights: Tensor | None = None) -> Pass:
        """What a pass over ``ids`` [B, T] shares. See ``Pass``; without ``weights`` all watched rows count the same."""
        rotation = self.get_buffer("rotation")[: ids.shape[1] + 3]
        by_row = torch.ones(() if watched is None else watched.shape) if weights is None else weights
        return Pass(rotation=rotation, is_sparse=is_sparse, watched=watched, weights=by_row)

    def forward(self, ids: Tensor, now: Pass) -> Tensor:
        """[B, T] -> final hidden states [B, T, hidden], behind the last norm."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, now)
        final: Tensor = self.norm(x)
        return final

    def drafts(self, final: Tensor, ids: Tensor, rows: Tensor, now: Pass) -> list[Tensor]:
        """See ``Draft.forward``."""
        outs: list[Tensor] = self.draft(final, ids, rows, now)
        return outs

    def balance(self, rate: float) -> float:
        """Moves all routers' biases; the worst load over the mean."""
        return max(module.balance(rate) for module in self.modules() if isinstance(module, Mixture))

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name in a checkpoint, fp32."""
        found = {"model.mtp.embed_tokens.weight": self.draft.word.detach().clone()}
        for module in self.modules():
            if isinstance(module, NgramEmbedding | Mixture | Norm | Matrix):
                found |= {name: tensor.detach().clone() for name, tensor in module.tensors()}
        return found

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the tensors of a checkpoint of the same configuration. KeyError where one is missing."""
        self.draft.word.copy_(tensors["model.mtp.embed_tokens.weight"])
        for module in self.modules():
            if isinstance(module, NgramEmbedding | Mixture):
                module.fill(tensors)
            elif isinstance(module, Norm | Matrix):
                module.weight.copy_(tensors[f"{module.name}.weight"])
