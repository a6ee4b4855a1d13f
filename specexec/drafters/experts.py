"""A mixture of gated MLPs as the layers of MTP heads have it: Qwen's softmax router and DeepSeek's sigmoid one."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from specexec.drafters.layers import GatedMlp


@dataclass(frozen=True)
class ExpertsShape:
    """How many experts of what size, and how a token chooses among them.

    num_chosen: experts per token. renormalize: their weights are made to sum to one; `scale` comes after that.
    sigmoid: scores are sigmoids, not a softmax. num_groups, chosen_groups: experts of the best groups only may be
        chosen; a group is as good as its two best. corrected: a learned bias takes part in choosing, not in weighing.
    shared_size: inner size of an MLP that every token passes, 0 for none; shared_gate: times a sigmoid of its own.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    renormalize: bool = True
    sigmoid: bool = False
    corrected: bool = False
    num_groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared_size: int = 0
    shared_gate: bool = False


class Experts(nn.Module):
    """Parameters: gate (its bias for choosing), gate_up_proj [E, 2 I, H], down_proj [E, H, I], shared, shared_gate."""

    def __init__(self, hidden: int, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(hidden, shape.num_experts, bias=shape.corrected)  # its bias is that of choosing
        self.gate_up_proj = nn.Parameter(torch.empty(shape.num_experts, 2 * shape.inner_size, hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.num_experts, hidden, shape.inner_size))
        if shape.shared_size:
            self.shared = GatedMlp(hidden, shape.shared_size)
        if shape.shared_gate:
            self.shared_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(end_dim=-2)
        weights, chosen = self._route(flat)
        result = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            tokens, places = torch.nonzero(chosen == expert, as_tuple=True)
            gate, up = F.linear(flat[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.down_proj[expert])
            result.index_add_(0, tokens, part * weights[tokens, places, None].to(part.dtype))
        if self.shape.shared_size:
            shared = self.shared(flat)
            result += self.shared_gate(flat).sigmoid() * shared if self.shape.shared_gate else shared
        return result.reshape(x.shape)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights fp32 and numbers of the chosen experts, each [n, num_chosen]."""
        shape = self.shape
        logits = F.linear(x.float(), self.gate.weight.float())
        scores = logits.sigmoid() if shape.sigmoid else logits.softmax(-1)
        ranked = scores + self.gate.bias.float() if shape.corrected else scores
        if shape.num_groups > 1:
            groups = ranked.unflatten(-1, (shape.num_groups, -1))
            best = groups.topk(2, dim=-1).values.sum(-1).topk(shape.chosen_groups, dim=-1).indices
            closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
            ranked = groups.masked_fill(closed[..., None], -torch.inf).flatten(-2)
        chosen = ranked.topk(shape.num_chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if shape.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * shape.scale, chosen
