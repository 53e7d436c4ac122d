"""The training: steps of the optimizer over what the feeder gives, with a curriculum and a state that can be kept.

Owns losses, schedule and curriculum. Knows no files but its state's.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from longcat_pd.errors import ConfigError
from tools.tiny.feeding import COPY, PAD, Batch, Curriculum, Feeder
from tools.tiny.recipe import NUM_DRAFTS, Recipe
from tools.tiny.twin import Twin
from tools.tiny.twin_parts import Matrix

_STATE = "state.safetensors"


@dataclass(kw_only=True)
class Seen:
    """Of one batch: mean losses, and by skill how many answers were right as a whole, teacher-forced."""

    next: float = 0.0
    drafts: float = 0.0
    index: float = 0.0
    has_index: int = 0
    tokens: int = 0
    right: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    drafted: list[float] = field(default_factory=lambda: [0.0] * NUM_DRAFTS)
    draftable: list[float] = field(default_factory=lambda: [0.0] * NUM_DRAFTS)

    def rate(self, skill: str) -> float:
        """Of the answers of a skill, the part that was right; 0 where none was asked."""
        return self.right.get(skill, 0.0) / max(self.asked.get(skill, 0.0), 1.0)


@dataclass(kw_only=True)
class Pace:
    """Where a training stands in its diet: the curriculum, how well it holds (running means), and in which pool."""

    curriculum: Curriculum
    copying: float = 0.0
    recalling: float = 0.0
    pool: int = 0
    taken: int = 0  # batches of the pool
    drawn_for: Curriculum = field(default_factory=lambda: Curriculum(copied=0, pairs=0))

    def follow(self, seen: Seen, recipe: Recipe) -> None:
        """Takes in what a batch showed; moves the curriculum where it holds."""
        now = self.curriculum
        if seen.asked.get(COPY):
            self.copying += 0.1 * (seen.rate(COPY) - self.copying)
            if self.copying > recipe.copy_holds and now.copied < recipe.last_copy:
                now.copied, self.copying = min(now.copied * 9 // 8 + 1, recipe.last_copy), self.copying - 0.1
        if seen.asked.get("recall"):
            self.recalling += 0.05 * (seen.rate("recall") - self.recalling)
            if self.recalling > recipe.recall_holds and now.pairs < recipe.last_pairs:
                now.pairs, self.recalling = min(now.pairs * 9 // 8 + 1, recipe.last_pairs), self.recalling - 0.05


def optimizers(twin: Twin, recipe: Recipe) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices that turn vectors into vectors, AdamW for the rest."""
    matrices = {
        id(module.weight): module.weight
        for module in twin.modules()
        if isinstance(module, Matrix) and module is not twin.head and ".indexer." not in module.name
    }
    others = [p for p in twin.parameters() if id(p) not in matrices]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return {
        "adamw": torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.epsilon),
        "muon": torch.optim.Muon(list(matrices.values()), weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
    }


class Training:
    """Everything that changes while training, and one step of it."""

    def __init__(self, twin: Twin, recipe: Recipe, feeder: Feeder) -> None:
        self.twin, self.recipe, self.feeder = twin, recipe, feeder
        self.step = 0
        self.pace = Pace(curriculum=Curriculum(copied=recipe.first_copy, pairs=recipe.first_pairs))
        self.optimizers = optimizers(twin, recipe)
        self._waiting = list[Batch]()

    @property
    def is_sparse(self) -> bool:
        """Whether attention sees the chosen keys alone."""
        return self.step >= self.recipe.sparse_from

    @property
    def learns_index(self) -> bool:
        """Whether indexers have a loss."""
        return self.step >= self.recipe.index_from

    def rate(self) -> float:
        """The learning rate of this step: a rise, then a cosine down to ``final_rate``, three times."""
        recipe, step = self.recipe, self.step
        starts = [0, *(min(start, recipe.steps) for start in (recipe.second_from, recipe.third_from)), recipe.steps]
        number = 0 if step < starts[1] else 1 if step < starts[2] else 2
        first, last, top = starts[number], starts[number + 1], (1.0, recipe.second_rate, recipe.third_rate)[number]
        rise = min(1.0, (step - first + 1) / recipe.warmup_steps)
        fall = 0.5 * (1 + math.cos(math.pi * (step - first) / (last - first)))
        return recipe.learning_rate * rise * (recipe.final_rate + (top - recipe.final_rate) * fall)

    def advance(self) -> Seen:
        """One step. Returns what it saw."""
        rates = {"adamw": self.rate(), "muon": self.rate() * self.recipe.muon_factor}
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rates[name]
            optimizer.zero_grad(set_to_none=True)
        seen = Seen()
        self._backward(self._next(), seen)
        clip_grad_norm_(self.twin.parameters(), self.recipe.clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.twin.balance(self.recipe.balance_rate)
        self.pace.follow(seen, self.recipe)
        self.step += 1
        return seen

    def _next(self) -> Batch:
        pace = self.pace
        if not self._waiting:  # a training that goes on may stand within a pool
            recipe = self.recipe
            changes = (recipe.late_from, recipe.second_from, recipe.third_from)
            pace.curriculum.diet = sum(self.step >= change for change in changes)
            pace.drawn_for = pace.drawn_for if pace.taken else replace(pace.curriculum)
            self._waiting = self.feeder(pace.pool, pace.drawn_for)[pace.taken :]
        pace.taken += 1
        batch = self._waiting.pop(0)
        if not self._waiting:
            pace.pool, pace.taken = pace.pool + 1, 0
        return batch

    def _backward(self, batch: Batch, seen: Seen) -> None:
        recipe, twin, ids, total = self.recipe, self.twin, batch.ids, batch.weights.sum()
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
            indexed = torch.stack(now.index_losses)
            whole = whole + recipe.index_weight * indexed.sum()
            seen.index, seen.has_index = float(indexed.detach().mean()), 1
        torch.autograd.backward(whole)
        seen.next, seen.drafts = float(loss.detach() / total), float(drafted.detach() / total)
        seen.tokens = int((ids != PAD).sum())
        self._count(batch, hits, seen)

    def _watched(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows of answers, and some others that count less."""
        count, length = batch.ids.shape
        draw = torch.Generator().manual_seed(self.step)
        others = torch.randint(length, (count, self.recipe.index_others), generator=draw)
        small = self.recipe.index_others_weight * (batch.ids.gather(1, others) != PAD)
        return torch.cat((batch.rows, others), 1), torch.cat((batch.weights.gt(0).float(), small), 1)

    def _count(self, batch: Batch, hits: Tensor, seen: Seen) -> None:
        for skill, answers, hit in zip(batch.skills, batch.answers, hits, strict=True):
            for first, count in answers:
                part = float(hit[first : first + count].float().mean())
                seen.right[skill] = seen.right.get(skill, 0.0) + (part if skill == COPY else float(part == 1.0))
                seen.asked[skill] = seen.asked.get(skill, 0.0) + 1

    def keep(self, folder: Path) -> None:
        """Writes all that a later ``resume_if_kept`` needs; what was kept before stays until it is complete."""
        tensors = {f"model.{name}": t.contiguous() for name, t in self.twin.state_dict().items()}
        for kind, optimizer in self.optimizers.items():
            for i, moments in optimizer.state_dict()["state"].items():
                tensors |= {f"{kind}.{i}.{name}": t.contiguous() for name, t in moments.items()}
        facts = {"step": self.step, "recipe": asdict(self.recipe), "pace": asdict(self.pace)}
        draft = folder / f".{_STATE}"
        save_file(tensors, draft, metadata={"facts": json.dumps(facts)})
        draft.rename(folder / _STATE)

    def resume_if_kept(self, folder: Path) -> None:
        """Goes on from what ``keep`` wrote, if it did. Raises ConfigError when that was of another recipe."""
        if not (folder / _STATE).is_file():
            return
        with safe_open(folder / _STATE, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
        kept, mine = facts["recipe"], json.loads(json.dumps(asdict(self.recipe)))
        if kept != mine:
            differing = [
                f"{key}={kept.get(key)}, not {mine.get(key)}" for key in kept | mine if kept.get(key) != mine.get(key)
            ]
            raise ConfigError(f"{folder} holds a training with another recipe: {'; '.join(differing)}")
        tensors = load_file(folder / _STATE)
        self.twin.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
        for kind, optimizer in self.optimizers.items():
            state = optimizer.state_dict()
            for name, tensor in tensors.items():
                if name.startswith(f"{kind}."):
                    _, number, moment = name.split(".")
                    state["state"].setdefault(int(number), {})[moment] = tensor
            optimizer.load_state_dict(state)
        pace = facts["pace"]
        curricula = {name: Curriculum(**pace[name]) for name in ("curriculum", "drawn_for")}
        self.step, self.pace = facts["step"], Pace(**{**pace, **curricula})


def _said(logits: Tensor, ids: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies of the tokens at ``places`` [B, R], and whether each was the likeliest."""
    wanted = functional.pad(ids, (0, NUM_DRAFTS + 1)).gather(1, places)
    losses = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
    return (losses * weights).sum(), logits.detach().argmax(-1) == wanted
