"""A small causal LM learns to say what the target says: an external draft of its own."""

import torch
from torch import nn
from transformers import PreTrainedModel

from specexec.drafters import Drafter
from specexec.drafters.model import ModelDrafter
from specexec.lm import CachedLM
from specexec.training.batches import Batch, TargetHead, frozen
from specexec.training.losses import agreement, guess_loss, in_parts


class DistillObjective(nn.Module):
    """The student reads the text alone and guesses each token of the answers from those before it.

    student: of the target's vocabulary. soft: see TrainRecipe.
    """

    def __init__(self, student: PreTrainedModel, head: TargetHead, *, soft: float) -> None:
        super().__init__()
        self.net, self._head, self._soft = student, head, soft

    def forward(self, batch: Batch) -> torch.Tensor:
        """[loss, weight, guesses on which both agree, guesses]: sums over the batch."""
        hidden = self.net.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
        rows = torch.arange(hidden.shape[1] - 1, device=hidden.device).expand(len(hidden), -1)
        counted = batch.is_said(rows + 1)
        return in_parts(self._compare, hidden[:, :-1][counted], batch.final[:, :-1][counted], batch.ids[:, 1:][counted])

    def _compare(self, hidden: torch.Tensor, final: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        draft, target = self.net.get_output_embeddings()(hidden).float(), self._head(final)
        size = min(draft.shape[-1], target.shape[-1])  # beyond it are rows that no token uses
        draft, target = draft[:, :size], target[:, :size]
        loss = guess_loss(draft, target, labels, self._soft).sum()
        count = loss.new_tensor(len(labels))
        return torch.stack([loss, count, agreement(draft, target).sum(), count])

    def drafter(self, target: CachedLM) -> Drafter:
        """The student as it is now, drafting for `target`."""
        return ModelDrafter(CachedLM(frozen(self.net, target), target.max_rows, vocab_size=target.vocab_size))
