"""The training: steps of the optimizer over what the feeder gives, with a curriculum and a state that can be kept.

Owns losses, schedule and curriculum. Knows no files but its state's.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from tools.tiny.feeding import COPY, PAD, Batch, Curriculum, Feeder
from tools.tiny.recipe import Recipe
from tools.tiny.twin import Twin

NUM_DRAFTS = 3
NUM_OTHERS, OTHERS_WEIGHT = 32, 0.1
_STATE = "state.safetensors"


@dataclass(kw_only=True)
class Seen:
    """Sums over batches: losses, and by skill how many answers were right as a whole, teacher-forced."""

    next: float = 0.0
    drafts: float = 0.0
    index: float = 0.0
    batches: int = 0
    tokens: int = 0
    right: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    drafted: list[float] = field(default_factory=lambda: [0.0] * NUM_DRAFTS)
    draftable: list[float] = field(default_factory=lambda: [0.0] * NUM_DRAFTS)

    def rate(self, skill: str) -> float:
        """Of the answers of a skill, the part that was right; 0 where none was asked."""
        return self.right.get(skill, 0.0) / max(self.asked.get(skill, 0.0), 1.0)


class Training:
    """Everything that changes while training, and one step of it."""

    def __init__(self, twin: Twin, recipe: Recipe, feeder: Feeder) -> None:
        self.twin, self.recipe, self.feeder = twin, recipe, feeder
        self.step = 0
        self.curriculum = Curriculum(pairs=recipe.first_pairs)
        self.recall_rate, self.copy_rate = 0.0, 0.0  # running means
        decayed = [p for p in twin.parameters() if p.dim() > 1]
        plain = [p for p in twin.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.97), eps=1e-9)

    @property
    def is_sparse(self) -> bool:
        """Whether attention sees the chosen keys alone."""
        return self.step >= self.recipe.sparse_from * self.recipe.steps

    @property
    def learns_index(self) -> bool:
        """Whether indexers have a loss."""
        return self.step >= self.recipe.index_from * self.recipe.steps

    def rate(self) -> float:
        """The learning rate of this step: a rise, then a cosine down to ``final_rate``."""
        recipe = self.recipe
        rise = min(1.0, (self.step + 1) / recipe.warmup_steps)
        fall = 0.5 * (1 + math.cos(math.pi * self.step / recipe.steps))
        return recipe.learning_rate * rise * (recipe.final_rate + (1 - recipe.final_rate) * fall)

    def advance(self) -> Seen:
        """One step. Returns what it saw."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        batches, seen = self.feeder(self.step, self.curriculum), Seen()
        total = float(sum(batch.weights.sum() for batch in batches))
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            self._backward(batch, total, seen)
        clip_grad_norm_(self.twin.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.twin.balance(self.recipe.balance_rate)
        self._harder(seen)
        self.step += 1
        return seen

    def _backward(self, batch: Batch, total: float, seen: Seen) -> None:
        recipe, twin, ids = self.recipe, self.twin, batch.ids
        watched, weights = self._watched(batch) if self.learns_index else (None, None)
        now = twin.begin(ids, is_sparse=self.is_sparse, watched=watched, weights=weights)
        final = twin(ids, now)
        near = final.gather(1, batch.rows.unsqueeze(-1).expand(-1, -1, final.shape[-1]))
        loss, hits = _said(twin.head(near), ids, batch.rows + 1, batch.weights)
        drafts = list[Tensor]()
        for step, hidden in enumerate(twin.drafts(final, ids, batch.rows, now)):
            ahead = batch.rows + 2 + step
            weights = batch.weights * functional.pad(batch.weights, (0, step + 1))[:, step + 1 :].gt(0)
            draft_loss, draft_hits = _said(twin.head(hidden), ids, ahead, weights)
            drafts.append(draft_loss)
            seen.drafted[step] += float((draft_hits & weights.gt(0)).sum())
            seen.draftable[step] += float(weights.gt(0).sum())
        drafted = torch.stack(drafts).mean()
        whole = (loss + recipe.draft_weight * drafted) / total
        if now.index_losses:
            whole = whole + recipe.index_weight * torch.stack(now.index_losses).sum() * len(ids) / recipe.examples_per_step
            seen.index += float(torch.stack([part.detach() for part in now.index_losses]).mean()) * len(ids)
        torch.autograd.backward(whole)
        seen.next += float(loss.detach()) / total
        seen.drafts += float(drafted.detach()) / total
        seen.batches += 1
        seen.tokens += int((ids != PAD).sum())
        self._count(batch, hits, seen)

    def _watched(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows of answers, and some others that count less."""
        count, length = batch.ids.shape
        draw = torch.Generator().manual_seed(self.step)
        others = torch.randint(length, (count, NUM_OTHERS), generator=draw)
        small = OTHERS_WEIGHT * (batch.ids.gather(1, others) != PAD)
        return torch.cat((batch.rows, others), 1), torch.cat((batch.weights.gt(0).float(), small), 1)

    def _count(self, batch: Batch, hits: Tensor, seen: Seen) -> None:
        is_there = batch.weights > 0
        whole = (hits | ~is_there).all(1)
        part = (hits & is_there).sum(1) / is_there.sum(1)
        for i, skill in enumerate(batch.skills):
            right = float(part[i]) if skill == COPY else float(whole[i])
            seen.right[skill] = seen.right.get(skill, 0.0) + right
            seen.asked[skill] = seen.asked.get(skill, 0.0) + 1

    def _harder(self, seen: Seen) -> None:
        """Moves the curriculum where what is asked now holds."""
        recipe, now = self.recipe, self.curriculum
        self.recall_rate += 0.05 * (seen.rate("recall") - self.recall_rate) * bool(seen.asked.get("recall"))
        self.copy_rate += 0.05 * (seen.rate(COPY) - self.copy_rate) * bool(seen.asked.get(COPY))
        if self.copy_rate > recipe.copy_holds:
            now.copying = False
        if self.recall_rate > recipe.recall_holds and now.pairs < recipe.last_pairs and self.step % 4 == 0:
            now.pairs = min(now.pairs + recipe.pairs_a_rise, recipe.last_pairs)

    def keep(self, folder: Path) -> None:
        """Writes all that a later ``resume`` needs; what was kept before stays until it is complete."""
        tensors = {f"model.{name}": t.contiguous() for name, t in self.twin.state_dict().items()}
        for i, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": t.contiguous() for name, t in moments.items()}
        facts = {
            "step": self.step, "recipe": asdict(self.recipe), "curriculum": asdict(self.curriculum),
            "recall_rate": self.recall_rate, "copy_rate": self.copy_rate,
        }  # fmt: skip
        draft = folder / f".{_STATE}"
        save_file(tensors, draft, metadata={"facts": json.dumps(facts)})
        draft.rename(folder / _STATE)

    def resume_if_kept(self, folder: Path) -> None:
        """Goes on from what ``keep`` wrote, if it did. Raises ValueError when that was of another recipe."""
        if not (folder / _STATE).is_file():
            return
        with safe_open(folder / _STATE, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
        if facts["recipe"] != asdict(self.recipe):
            raise ValueError(f"{folder} holds a training with another recipe: {facts['recipe']}")
        tensors = load_file(folder / _STATE)
        self.twin.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
        state = self.optimizer.state_dict()
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, moment = name.split(".")
                state["state"].setdefault(int(number), {})[moment] = tensor
        self.optimizer.load_state_dict(state)
        self.step, self.curriculum = facts["step"], Curriculum(**facts["curriculum"])
        self.recall_rate, self.copy_rate = facts["recall_rate"], facts["copy_rate"]


def _said(logits: Tensor, ids: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies of the tokens at ``places`` [B, R], and whether each was the likeliest."""
    wanted = functional.pad(ids, (0, NUM_DRAFTS + 1)).gather(1, places)
    losses = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
    return (losses * weights).sum(), logits.detach().argmax(-1) == wanted
