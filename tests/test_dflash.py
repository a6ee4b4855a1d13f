"""DFlash: the pass equals numpy's, a draft built to be right is accepted whole, its tree is the most probable one."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from blocks import BLOCK, DFLASH, HIDDEN, MASK, TARGET, config_of, plain_features, plain_hidden, tensors_of
from cycle import PERIOD, accepted, cyclic_target, looking_back
from oracles import noise, random_tree
from tiny import VOCAB, tiny_model

from specexec.acceptance import Acceptance
from specexec.budget import Budget
from specexec.drafters.dflash import BlockPass, DFlashDrafter, DFlashNet
from specexec.drafters.dflash_layout import block_drafter, block_layout, block_net
from specexec.lm import CachedLM, as_ids, score_tree
from specexec.tree import ROOT, depths

CONTEXT = as_ids(np.random.default_rng(3).integers(3, VOCAB, 13))


def net_of(config: dict, tensors: dict[str, torch.Tensor]) -> DFlashNet:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return block_net(block_layout(config, shapes, TARGET), tensors, torch.float32)


def contexts(lm: CachedLM, context: np.ndarray, count: int):
    """Contexts as a run would show them: each goes on along some path of a scored tree, then with another token."""
    rng = np.random.default_rng(7)
    for step in range(count):
        tree = random_tree(10, VOCAB, seed=step)
        score_tree(lm, context, tree)
        path, node = [], ROOT
        while len(children := np.flatnonzero(tree.parents == node)) and rng.random() < 0.8:
            node = int(rng.choice(children))
            path.append(int(tree.tokens[node]))
        context = np.concatenate([context, path, rng.integers(3, VOCAB, 1)]).astype(np.int64)
        yield context


def embedded(model: torch.nn.Module, tensors: dict[str, torch.Tensor], root: int) -> np.ndarray:
    weight = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    return weight[[root] + [MASK] * (BLOCK - 1)].double().numpy()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("layout", DFLASH)
def test_the_pass_equals_numpy_s_along_a_run(layout: str, family: str) -> None:
    model, tensors = tiny_model(family), tensors_of(layout)
    lm = CachedLM(model, 80)
    block = BlockPass(net_of(config_of(layout), tensors), lm)
    skipped = 1 if layout != "DeepSpec" else 0
    head = tensors.get("lm_head.weight", model.get_output_embeddings().weight).double().numpy()
    assert block.hidden(CONTEXT) is None, "nothing has been computed yet"
    for number, context in enumerate(contexts(lm, CONTEXT, 6)):
        if number == 2:
            continue  # as when drafting was paused
        hidden = block.hidden(context)
        expected = plain_hidden(tensors, plain_features(model, context), embedded(model, tensors, context[-1]))
        np.testing.assert_allclose(hidden, expected[skipped:], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(block.logits(hidden), expected[skipped:] @ head.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (4, True), (4, False)])
def test_windows_and_causality(window: int | None, causal: bool) -> None:
    model, tensors = tiny_model("llama"), tensors_of("z-lab")
    config = config_of("z-lab")
    config["dflash_config"]["causal"] = causal
    if window:
        config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    lm = CachedLM(model, 80)
    block = BlockPass(net_of(config, tensors), lm)
    lm.prefill(CONTEXT)
    features, x = plain_features(model, CONTEXT), embedded(model, tensors, CONTEXT[-1])
    expected = plain_hidden(tensors, features, x, window=window, causal=causal)[1:]
    np.testing.assert_allclose(block.hidden(CONTEXT), expected, atol=1e-5, rtol=1e-5)
    assert np.abs(plain_hidden(tensors, features, x)[1:] - expected).max() > 1e-2


def test_what_the_config_does_to_embeddings_and_logits() -> None:
    model, tensors = tiny_model("llama"), tensors_of("z-lab")
    scaled = config_of("z-lab") | {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2}
    lm = CachedLM(model, 80, vocab_size=VOCAB - 20)
    block = BlockPass(net_of(scaled, tensors), lm)
    lm.prefill(CONTEXT)
    hidden = block.hidden(CONTEXT)
    expected = plain_hidden(tensors, plain_features(model, CONTEXT), 3 * embedded(model, tensors, CONTEXT[-1]))[1:]
    np.testing.assert_allclose(hidden, expected, atol=1e-5, rtol=1e-5)
    logits = expected @ model.get_output_embeddings().weight.double().numpy().T
    np.testing.assert_allclose(block.logits(hidden), 2 * np.tanh(logits[:, : VOCAB - 20] / 4), atol=1e-5, rtol=1e-4)


def test_another_text_takes_nothing_from_the_one_before() -> None:
    model, tensors = tiny_model("llama"), tensors_of("z-lab")
    lm = CachedLM(model, 80)
    block = BlockPass(net_of(config_of("z-lab"), tensors), lm)
    for context in (CONTEXT, np.concatenate([CONTEXT[:6], CONTEXT[::-1]]), CONTEXT[:9]):
        lm.prefill(context)
        expected = plain_hidden(tensors, plain_features(model, context), embedded(model, tensors, context[-1]))
        np.testing.assert_allclose(block.hidden(context), expected[1:], atol=1e-5, rtol=1e-5)


def test_many_blocks_of_several_texts_at_once() -> None:
    """As in training: leading dimensions, blocks side by side under one mask."""
    net = net_of(config_of("z-lab"), tensors_of("z-lab"))
    features, x = torch.randn(2, 9, 2 * HIDDEN), torch.randn(2, 2 * BLOCK, HIDDEN)
    starts = (4, 7)
    positions = torch.cat([torch.arange(start, start + BLOCK) for start in starts])
    number = torch.arange(2 * BLOCK) // BLOCK
    before = torch.arange(9)[None, :] < torch.tensor(starts)[number][:, None]
    mask = torch.cat([before, number[:, None] == number[None, :]], dim=1)
    rows = net.context(features, torch.arange(9))

    def behind(layer: int, *fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = (torch.cat(pair, dim=-2) for pair in zip(rows[layer], fresh, strict=True))
        return keys, values, mask

    both = net(x, positions, [partial(behind, layer) for layer in range(len(rows))])
    for text, (block, start) in itertools.product(range(2), enumerate(starts)):
        mine = slice(block * BLOCK, (block + 1) * BLOCK)
        expected = plain_hidden(
            tensors_of("z-lab"), features[text, :start].double().numpy(), x[text, mine].double().numpy()
        )
        np.testing.assert_allclose(both[text, mine].detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", DFLASH)
def test_a_draft_that_is_right_is_accepted_whole_and_one_off_is_caught(layout: str) -> None:
    model, prompt = cyclic_target()
    ahead = BLOCK if layout == "DeepSpec" else BLOCK - 1
    lag = PERIOD if layout == "DeepSpec" else PERIOD + 1
    config, tensors = config_of(layout), looking_back(model, layout, lag)
    assert accepted(model, prompt, config, tensors) == ahead
    for wrong in (lag - 1, lag + 1):
        assert accepted(model, prompt, config, looking_back(model, layout, wrong)) < 1
    where = config["dflash_config"] if layout == "z-lab" else config
    key = "aux_hidden_state_layer_ids" if layout == "speculators" else "target_layer_ids"
    for shift in (-1, 1):
        right, where[key] = where[key], [layer + shift for layer in where[key]]
        assert accepted(model, prompt, config, tensors) < 1, "layers one off"
        where[key] = right
    where[key] = where[key][::-1]
    assert accepted(model, prompt, config, tensors) < 1, "layers in another order"
    where[key] = where[key][::-1]
    assert accepted(model, prompt, config | {"sample_from_anchor": layout != "DeepSpec"}, tensors) < 1


@pytest.mark.parametrize("is_coupled", [True, False])
@pytest.mark.parametrize(("num_nodes", "max_depth", "temperature"), [(1, 9, 0), (9, 9, 0), (40, 2, 1.0), (200, 4, 0.8)])
def test_the_tree_is_the_most_probable_one(
    num_nodes: int, max_depth: int, temperature: float, is_coupled: bool
) -> None:
    budget = Budget(num_nodes, max_depth, temperature, noise=noise if is_coupled else None)
    model, tensors = tiny_model("llama"), tensors_of("speculators", num_ids=6)
    net = net_of(config_of("speculators", num_ids=6), tensors)
    lm = CachedLM(model, 80)
    drafter, block = DFlashDrafter(net, lm), BlockPass(net, lm)
    assert len(drafter.propose(CONTEXT, budget)) == 0
    lm.prefill(CONTEXT)
    tree = drafter.propose(CONTEXT, budget)
    ids = net.target_ids().numpy()
    logits = block.logits(block.hidden(CONTEXT)).double().numpy()
    if is_coupled:
        logits += temperature * np.stack([noise(slot, VOCAB)[ids] for slot in range(len(logits))])
    slots = Acceptance().logprobs(logits, temperature)
    every = {
        tuple(ids[list(path)].tolist()): sum(slots[slot][token] for slot, token in enumerate(path))
        for depth in range(1, min(max_depth, len(slots)) + 1)
        for path in itertools.product(range(6), repeat=depth)
    }
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    assert len(set(paths)) == len(paths) == min(num_nodes, len(every))
    np.testing.assert_allclose([every[path] for path in paths], tree.scores, atol=1e-4)
    np.testing.assert_allclose(sorted(every.values(), reverse=True)[:num_nodes], tree.scores, atol=1e-4)
    assert depths(tree.parents).max() <= max_depth


def test_every_slot_learns_what_its_own_guesses_are_worth() -> None:
    model, prompt = cyclic_target()
    lm = CachedLM(model, 200)
    drafter = block_drafter(config_of("z-lab"), looking_back(model, "z-lab", PERIOD + 1), lm)
    accepted(model, prompt, config_of("z-lab"), {}, drafter=drafter, target=lm)
    assert len(drafter.acceptances) == BLOCK - 1
    before = Acceptance().logprobs(np.array([[3.0, 1.0]]), 0)[0, 0]
    for acceptance in drafter.acceptances:
        assert acceptance.logprobs(np.array([[3.0, 1.0]]), 0)[0, 0] > before
    counts = [record.to_data()["0.00"]["counts"][1] for record in drafter.acceptances]
    assert counts == sorted(counts, reverse=True)


def test_the_target_computes_nothing_for_the_draft() -> None:
    model, prompt = cyclic_target()
    lm = CachedLM(model, 200)
    drafter = block_drafter(config_of("z-lab"), looking_back(model, "z-lab", PERIOD + 1), lm)
    lm.prefill(as_ids(prompt))
    computed = lm.num_computed
    drafter.propose(as_ids(prompt), Budget(8, 8))
    assert lm.num_computed == computed
