"""A target whose features name their layer and token, so that only a draft fed exactly right can guess its text."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny import tiny_model
from transformers import PreTrainedModel

from specexec.drafters import Drafter
from specexec.drafters.recurrent import RecurrentHead
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler
from specexec.tree import TokenTree

VOCAB = 48
HIDDEN = 64
CONSTANT = 63  # a coordinate that is 1 in every embedding
_rng = np.random.default_rng(11)


def _cycle() -> np.ndarray:
    """A permutation of the vocabulary that is one cycle."""
    order = _rng.permutation(VOCAB)
    following = np.empty(VOCAB, np.int64)
    following[order] = np.roll(order, -1)
    return following


NEXT = _cycle()  # the target says NEXT[x] after x
LAYER = _cycle()  # each layer replaces the token y that its hidden state names by LAYER[y]


def power(permutation: np.ndarray, exponent: int) -> np.ndarray:
    result = np.arange(VOCAB)
    for _ in range(exponent):
        result = permutation[result]
    return result


def one_hot_map(sources: np.ndarray, targets: np.ndarray, rows: int = HIDDEN, columns: int = HIDDEN) -> torch.Tensor:
    """The matrix that takes unit vector sources[i] to unit vector targets[i]."""
    matrix = torch.zeros(rows, columns)
    matrix[targets, sources] = 1
    return matrix


def replace_by_mlp(mlp: torch.nn.Module, permutation: np.ndarray, height: float) -> None:
    """Make a gated MLP turn unit vector y, read at `height`, into permutation[y]."""
    tokens = np.arange(VOCAB)
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight.zero_()
        projection.weight[tokens, tokens] = 1
    gain = float(torch.nn.functional.silu(torch.tensor(height))) * height
    mlp.down_proj.weight.zero_()
    mlp.down_proj.weight[:, :VOCAB] = (one_hot_map(tokens, permutation) - one_hot_map(tokens, tokens))[:, :VOCAB] / gain


def constructed_target() -> PreTrainedModel:
    """A llama that says NEXT[x] after x; the output of layer i names token LAYER^(i + 1)[x]."""
    model = tiny_model("llama", vocab_size=VOCAB)
    tokens = np.arange(VOCAB)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[tokens, tokens] = 1
        model.model.embed_tokens.weight[:, CONSTANT] = 1
        for layer in model.model.layers:
            replace_by_mlp(layer.mlp, LAYER, height=(HIDDEN / 2) ** 0.5)
        model.model.norm.weight[CONSTANT] = 0  # so that features before and after the final norm can be told apart
        model.lm_head.weight[NEXT, power(LAYER, 4)] = 10
    return model


def answer(prompt: list[int], count: int) -> list[int]:
    """What the target says."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(NEXT[text[-1]]))
    return text[len(prompt) :]


def accepted(drafter: Drafter, target: CachedLM) -> list[int]:
    """How many of each tree's nodes were accepted, the first tree left out, which cannot be grown yet."""
    prompt = [5, 9, 30, 2, 17]
    sampler = make_sampler(SamplingParams(), (), len(prompt))
    steps = list(generate(target, drafter, prompt, sampler, budget=6, max_tokens=36))
    assert [token for step in steps for token in step.tokens] == answer(prompt, 36)
    assert steps[0].drafted == 0
    return [step.accepted for step in steps[1:]]


def grown(head: RecurrentHead, tree: TokenTree) -> Iterator[torch.Tensor]:
    """Logits of the nodes, given in as few batches as parents allow, which must be known before their children."""
    start = 0
    for end in range(1, len(tree) + 1):
        if end == len(tree) or tree.parents[end] >= start:
            yield head.extend(tree.tokens[start:end], tree.parents[start:end])
            start = end


def shift(head: RecurrentHead, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed a head wrongly by one: another row's features, the token before, or nodes at the position before theirs."""
    rows, embed, extend, run = head._tap.rows, head._embed, head.extend, head._run
    if what == "feature row":
        monkeypatch.setattr(
            head._tap, "rows", lambda context: None if rows(context) is None else rows(context).roll(1, 0)
        )
    if what == "token":
        before = torch.from_numpy(np.argsort(NEXT))
        monkeypatch.setattr(head, "_embed", lambda ids: embed(before[ids]))
    if what == "position":

        def extend_elsewhere(tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
            with monkeypatch.context() as patch:
                off = lambda *given, positions, mask: run(*given, positions=positions - 1, mask=mask)  # noqa: E731
                patch.setattr(head, "_run", off)
                return extend(tokens, parents)

        monkeypatch.setattr(head, "extend", extend_elsewhere)
