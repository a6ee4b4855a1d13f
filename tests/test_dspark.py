"""DSpark: its heads equal numpy's in every layout, a right draft is accepted whole, its tree is the most probable."""

import numpy as np
import pytest
import torch
from blocks import (
    BLOCK,
    DSPARK,
    HIDDEN,
    MASK,
    RANK,
    TARGET,
    PlainHeads,
    config_of,
    plain_features,
    plain_hidden,
    tensors_of,
)
from cycle import TOKENS, accepted, cyclic_target
from oracles import noise
from tiny import VOCAB, tiny_model

from specexec.acceptance import Acceptance
from specexec.budget import Budget
from specexec.drafters.dflash import BlockPass
from specexec.drafters.dflash_layout import block_drafter, block_layout, block_net
from specexec.drafters.dspark import DSparkDrafter, DSparkNet
from specexec.lm import CachedLM, as_ids
from specexec.tree import ROOT, depths

HEADS = ("vanilla", "gated", "rnn")
CONTEXT = as_ids(np.random.default_rng(3).integers(3, VOCAB, 13))


def net_of(config: dict, tensors: dict[str, torch.Tensor]) -> DSparkNet:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return block_net(block_layout(config, shapes, TARGET), tensors, torch.float32)


def plain_block(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and logits of every place of the block behind CONTEXT."""
    weight = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    block = weight[[CONTEXT[-1]] + [MASK] * (BLOCK - 1)].double().numpy()
    hidden = plain_hidden(tensors, plain_features(model, CONTEXT), block)
    return hidden, hidden @ tensors.get("lm_head.weight", model.get_output_embeddings().weight).double().numpy().T


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", DSPARK)
def test_backbone_and_heads_equal_numpy_s(layout: str, head: str) -> None:
    model, tensors = tiny_model("llama"), tensors_of(layout, head)
    net, lm = net_of(config_of(layout, head), tensors), CachedLM(model, 80)
    lm.prefill(CONTEXT)
    block = BlockPass(net.backbone, lm)
    lm.prefill(CONTEXT)
    hidden, (expected, logits) = block.hidden(CONTEXT), plain_block(model, tensors)
    np.testing.assert_allclose(hidden, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(block.logits(hidden), logits, atol=1e-4, rtol=1e-5)
    plain, state, plain_state = PlainHeads(tensors, head), torch.zeros(1, net.mix.state_size), np.zeros(RANK)
    for slot, token in enumerate(np.random.default_rng(0).integers(0, VOCAB, BLOCK).tolist()):
        ids, place = torch.tensor([token]), hidden[slot : slot + 1]
        correction, state = net.correct(ids, place, state)
        wanted, plain_state, sure = plain.after(token, expected[slot], plain_state)
        np.testing.assert_allclose(correction[0], wanted, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(net.confidence(ids, place).sigmoid()[0], sure, atol=1e-5)
    assert not net.mix.state_size or np.abs(plain_state).max() > 1e-2


def test_confidence_without_the_previous_token_and_without_a_head() -> None:
    tensors, hidden, ids = tensors_of("DeepSpec", "vanilla"), torch.randn(3, HIDDEN), torch.tensor([1, 2, 3])
    name = "confidence_head.proj.weight"
    narrow = tensors | {name: tensors[name][:, :HIDDEN]}
    sure = net_of(config_of("DeepSpec", "vanilla"), narrow).confidence(ids, hidden)
    expected = hidden @ narrow[name][0] + narrow["confidence_head.proj.bias"]
    torch.testing.assert_close(sure, expected)
    none = {name: tensor for name, tensor in tensors.items() if "confidence" not in name}
    config = config_of("DeepSpec", "vanilla") | {"enable_confidence_head": False}
    assert (net_of(config, none).confidence(ids, hidden).sigmoid() == 1).all()


def succession(layout: str, head: str, num_ids: int) -> dict[str, torch.Tensor]:
    """A draft whose Markov head knows each token's successor in the circle and whose backbone knows nothing."""
    tensors = {
        name: torch.zeros_like(tensor) if tensor.is_floating_point() and "norm" not in name else tensor
        for name, tensor in tensors_of(layout, head, num_ids=num_ids).items()
    }
    if num_ids < VOCAB:  # the first ids are the circle's tokens, ascending
        tensors["d2t"] = torch.from_numpy(np.sort(TOKENS)) - torch.arange(num_ids)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.from_numpy(TOKENS), True)
    own = {name.split("markov_head.")[-1]: tensor for name, tensor in tensors.items()}
    codes = torch.nn.functional.normalize(torch.randn(len(TOKENS), RANK, generator=torch.Generator().manual_seed(0)))
    followers = np.roll(TOKENS, -1)
    own["markov_w1.weight"][TOKENS] = codes
    if head == "gated":
        own["gate_proj.bias"].fill_(20)
    if head == "rnn":
        own["joint_proj.weight"][2 * RANK :, RANK : 2 * RANK] = 1e-3 * torch.eye(RANK)
        codes = 1e3 * codes
    rows = followers if num_ids == VOCAB else np.argsort(np.argsort(TOKENS))[np.roll(np.arange(num_ids), -1)]
    own["markov_w2.weight"][rows] = 1000 * codes
    next(tensor for name, tensor in own.items() if name.endswith(".bias") and "conf" in name).fill_(9)
    return tensors


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("num_ids", [VOCAB, len(TOKENS)])
def test_a_draft_that_is_right_is_accepted_whole(head: str, num_ids: int) -> None:
    model, prompt = cyclic_target()
    config = config_of("speculators", head, num_ids=num_ids)
    tensors = succession("speculators", head, num_ids)
    assert accepted(model, prompt, config, tensors) == BLOCK
    w1 = tensors["markov_head.markov_w1.weight"]
    w1[TOKENS] = w1[np.roll(TOKENS, 1)]  # as if it were fed the token before the previous one
    assert accepted(model, prompt, config, tensors) < 1
    if head != "rnn":
        late = config | {"sample_from_anchor": False}
        assert accepted(model, prompt, late, succession("speculators", head, num_ids)) == BLOCK - 1


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "temperature", "least"),
    [(1, 9, 0, 0), (12, 9, 0, 0), (70, 3, 1.0, 0), (150, 5, 0.8, 0), (150, 5, 0.8, 0.25)],
)
@pytest.mark.parametrize("is_coupled", [True, False])
def test_the_tree_is_the_most_probable_one(
    head: str, is_coupled: bool, num_nodes: int, max_depth: int, temperature: float, least: float
) -> None:
    model, tensors = tiny_model("llama"), tensors_of("speculators", head, num_ids=6, scale=0.4)
    net, lm = net_of(config_of("speculators", head, num_ids=6), tensors), CachedLM(model, 80)
    drafters = [DSparkDrafter(net, lm, max_batch=batch, least_survival=least) for batch in (1, 32)]
    budget = Budget(num_nodes, max_depth, temperature, noise=noise if is_coupled else None)
    assert len(drafters[0].propose(CONTEXT, budget)) == 0, "nothing has been computed yet"
    lm.prefill(CONTEXT)
    every, pruned = every_path(model, tensors, head, budget, least)
    assert (pruned > 0) == (least > 0)
    for drafter in drafters:
        tree = drafter.propose(CONTEXT, budget)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent != ROOT else ()), token))
        assert len(set(paths)) == len(paths) == min(num_nodes, len(every))
        np.testing.assert_allclose([every[path] for path in paths], tree.scores, atol=1e-4)
        np.testing.assert_allclose(sorted(every.values(), reverse=True)[:num_nodes], tree.scores, atol=1e-4)
        assert depths(tree.parents).max() <= max_depth


def every_path(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], head: str, budget: Budget, least: float
) -> tuple[dict[tuple[int, ...], float], int]:
    """The score of every path that may be proposed, and how many nodes the confidence leaves without children."""
    ids = (tensors["d2t"] + torch.arange(6)).tolist()
    hidden, logits = plain_block(model, tensors)
    plain, found, pruned = PlainHeads(tensors, head), {}, 0
    pending = [((), int(CONTEXT[-1]), 0.0, np.zeros(RANK), 1.0)]
    while pending:
        path, token, score, state, survival = pending.pop()
        slot = len(path)
        correction, state, sure = plain.after(token, hidden[slot], state)
        added = budget.temperature * budget.noise(slot, VOCAB)[ids] if budget.noise else 0.0
        scores = Acceptance().logprobs((logits[slot] + correction + added)[None], budget.temperature)[0]
        for child, (token, own) in enumerate(zip(ids, scores.tolist(), strict=True)):
            found[*path, token] = score + own
            if slot + 1 < min(budget.max_depth, BLOCK) and survival * sure >= least:
                pending.append(((*path, token), token, score + own, state, survival * sure))
            elif survival * sure < least:
                pruned += child == 0
    return found, pruned


def test_growth_ends_where_a_step_costs_more_than_it_can_bring() -> None:
    model, tensors = tiny_model("llama"), tensors_of("DeepSpec", "vanilla")
    lm = CachedLM(model, 80)
    drafter = block_drafter(config_of("DeepSpec", "vanilla"), tensors, lm)
    lm.prefill(CONTEXT)
    free = drafter.propose(CONTEXT, Budget(200, 9, 1.0))
    dear = drafter.propose(CONTEXT, Budget(200, 9, 1.0, rate=1e9))
    assert depths(free.parents).max() > depths(dear.parents).max() == 2
