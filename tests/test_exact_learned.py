"""The same seed gives the same text with EAGLE-3 and MTP drafts, whatever the budget, resident and streamed."""

from collections.abc import Callable
from dataclasses import replace

import eagles
import mtps
import numpy as np
import pytest
import torch
from oracles import PENALISED, plain_text
from tiny import VOCAB, attention_of, save, tiny_model
from transformers import PreTrainedModel

from offload.checkpoint import open_checkpoint
from offload.load import load_model, outline
from offload.plan import plan
from specexec.acceptance import Acceptance
from specexec.budget import Budget, Pace
from specexec.drafters import Drafter
from specexec.drafters.eagle3 import Eagle3Config, Eagle3Net, eagle3_drafter
from specexec.drafters.eagle3_layout import eagle3_layout
from specexec.drafters.graft import GraftDrafter
from specexec.drafters.layouts import TargetShape, fill, on_meta
from specexec.drafters.mtp import MtpNet, mtp_drafter
from specexec.drafters.mtp_layout import mtp_layout
from specexec.drafters.recurrent import RecurrentDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.engine import generate
from specexec.lm import CachedLM, as_ids
from specexec.sampling import SamplingParams, make_sampler
from specexec.tree import TokenTree

TOKENS = 12
TARGET = TargetShape(hidden_size=64, num_layers=4, vocab_size=VOCAB)
FAMILIES: dict[str, tuple[int | None, ...]] = {  # budgets (None: automatic) by what sets families apart
    "llama": (1, 4, 16, 64, None),
    **dict.fromkeys(("gemma2", "mistral", "qwen3_moe", "gpt_oss"), (16,)),  # soft-caps, windows, experts, sinks
}
KINDS = ("eagle3 safeailab", "eagle3 another width", "mtp speculators", "mtp qwen moe", "mtp glm two dense")
PROMPT = [*np.random.default_rng(1).integers(3, VOCAB, 11).tolist(), 40, 41, 42, 40, 41]


def drafter_of(kind: str, target: CachedLM) -> Drafter:
    mechanism, _, layout = kind.partition(" ")
    build, read, drafter = {
        "eagle3": (Eagle3Net, eagle3_layout, eagle3_drafter),
        "mtp": (MtpNet, mtp_layout, mtp_drafter),
    }[mechanism]
    config, tensors = eagles.stored(layout)[:2] if mechanism == "eagle3" else mtps.Reference(layout).stored()
    shape, sources = read(config, {name: tuple(each.shape) for name, each in tensors.items()}, TARGET)
    net = on_meta(build, shape)
    fill(net, sources, tensors.__getitem__, torch.float32)
    return drafter(net, target)


def text_of(target: CachedLM, drafter: Drafter, params: SamplingParams, budget: int | Pace, tokens: int = TOKENS):
    """The text, how many nodes were drafted and how many accepted."""
    sampler = make_sampler(params, (), len(PROMPT))
    steps = list(generate(target, drafter, PROMPT, sampler, budget=budget, max_tokens=tokens))
    text = [token for step in steps for token in step.tokens]
    return text, sum(step.drafted for step in steps), sum(step.accepted for step in steps)


@pytest.mark.parametrize("params", [SamplingParams(), PENALISED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_does_not_depend_on_draft_or_budget(family: str, params: SamplingParams) -> None:
    model = tiny_model(family)
    expected = plain_text(model, PROMPT, params, max_tokens=TOKENS)
    for kind in KINDS:
        target = CachedLM(model, 200)
        drafter = drafter_of(kind, target)
        for budget in FAMILIES[family]:
            text, drafted, _ = text_of(target, drafter, params, budget or Pace())
            assert text == expected, f"{kind}, budget {budget}"
            assert drafted > 0
    target = CachedLM(model, 200)
    grafted = GraftDrafter(drafter_of("mtp speculators", target), SuffixDrafter())
    assert text_of(target, grafted, params, 16)[0] == expected


@pytest.mark.parametrize(
    ("family", "resident", "on_host"), [("llama", 0, ()), ("gemma3_text", 2, ()), ("llama", 1, (("embedding", 81920),))]
)
def test_streamed_text_equals_the_resident_model_s(family: str, resident: int, on_host: tuple, tmp_path) -> None:
    model = tiny_model(family)
    checkpoint, attention = open_checkpoint(save(model, tmp_path)), attention_of(model.config)
    layers = outline(checkpoint, attn_implementation=attention).layers
    chosen = plan(layers, fixed={}, limit_bytes=2**40, num_slots=2, resident=resident)
    chosen = replace(chosen, host_items=on_host)
    with load_model(checkpoint, chosen, attn_implementation=attention) as loaded:
        assert loaded.streamer is not None
        for kind, params in ((kind, params) for kind in KINDS for params in (SamplingParams(), PENALISED)):
            target = CachedLM(loaded.model, 100)
            text, drafted, _ = text_of(target, drafter_of(kind, target), params, 16)
            assert text == plain_text(model, PROMPT, params, max_tokens=TOKENS), kind
            assert drafted > TOKENS


def fitted_eagle(model: PreTrainedModel, text: list[int]) -> Eagle3Net:
    """A head that has learned one text by heart: partly right, as real ones are. It is trained on a batch of one."""
    torch.manual_seed(0)
    net = Eagle3Net(
        Eagle3Config(64, 64, (0, 1, 2), VOCAB, VOCAB, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    )
    ids, layer_ids = torch.tensor([text]), net.config.layer_ids
    with torch.no_grad():
        states = model(input_ids=ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1] for i in layer_ids], dim=-1)[:, :-1]
        embeds = model.get_input_embeddings()(ids[:, 1:-1])
    places = torch.arange(ids.shape[1] - 2)
    mask = places <= places[:, None]
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        _, output = net(embeds, net.fuse(features), places, [lambda keys, values: (keys, values, mask)])
        torch.nn.functional.cross_entropy(net.lm_head(output)[0], ids[0, 2:]).backward()
        optimizer.step()
    return net.requires_grad_(False)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_head_that_is_partly_right_is_accepted_in_part_and_changes_nothing(family: str) -> None:
    model, tokens = tiny_model(family), 30
    for params in (SamplingParams(), PENALISED):
        expected = plain_text(model, PROMPT, params, max_tokens=tokens)
        net = fitted_eagle(model, [*PROMPT, *expected])
        for budget in (4, 64, Pace()):
            target = CachedLM(model, 200)
            text, _, accepted = text_of(target, eagle3_drafter(net, target), params, budget, tokens)
            assert text == expected
            # An automatic budget depends on the clock: on a busy machine it may decide that drafting does not pay.
            assert isinstance(budget, Pace) or tokens // 4 < accepted


def best_tree(conditionals: Callable[[TokenTree], np.ndarray], ids: np.ndarray, num_nodes: int, temperature: float):
    """All paths of up to three of `ids`: the `num_nodes` most probable, and their probability in all."""
    count = len(ids)
    parents = np.concatenate([np.full(count, -1), np.repeat(np.arange(count), count)])
    everything = TokenTree(np.tile(ids, count + 1), parents, np.zeros(len(parents), np.float32))
    logits = conditionals(everything)[:, ids]
    logprobs = Acceptance().logprobs(logits.astype(np.float64), temperature)
    paths = {(): 0.0}
    rows = {(): 0}
    for node, (token, parent) in enumerate(zip(everything.tokens.tolist(), parents.tolist(), strict=True)):
        above = next(path for path, row in rows.items() if row == parent + 1)
        rows[(*above, token)] = node + 1
    for path in sorted(rows, key=len):
        for place, token in enumerate(ids.tolist()):
            paths[(*path, token)] = paths[path] + float(logprobs[rows[path], place])
    del paths[()]
    best = sorted(paths, key=paths.__getitem__, reverse=True)[:num_nodes]
    return set(best), sum(np.exp(paths[path]) for path in best)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_tree_is_the_best_possible_under_the_head_s_own_recurrence(kind: str) -> None:
    context, size = as_ids(np.random.default_rng(6).integers(3, VOCAB, 9)), 8
    model = tiny_model("llama")
    model.lm_head.weight.mul_(0.05)  # flat enough for trees to be wide
    if kind == "eagle3":  # a draft vocabulary of eight
        config, tensors, facts = eagles.stored("safeailab")
        tensors = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
        tensors |= {"d2t": tensors["d2t"][:size], "lm_head.weight": tensors["lm_head.weight"][:size]}
        config = {**config, "draft_vocab_size": size}
        ids = (tensors["d2t"] + torch.arange(size)).numpy()
        target = CachedLM(model, 200)
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        shape, sources = eagle3_layout(config, shapes, TARGET)
        net = on_meta(Eagle3Net, shape)
        fill(net, sources, tensors.__getitem__, torch.float32)
        head = eagle3_drafter(net, target).head
        reference = eagles.Reference(config, tensors, facts, model.model.embed_tokens.weight, model.lm_head.weight)
        features = eagles.true_features(model, context, list(shape.layer_ids))
        conditionals = lambda tree: reference.scores(features, context, tree)  # noqa: E731
    else:  # a target whose vocabulary is cut to eight
        ids, target = np.arange(size), CachedLM(model, 200, vocab_size=size)
        head = drafter_of("mtp speculators", target).head
        conditionals = lambda tree: mtps.Reference("speculators").scores(model, context, tree).numpy()  # noqa: E731
    target.prefill(context[:-1])
    for num_nodes, temperature in ((1, 0.0), (12, 0.0), (40, 1.0), (90, 0.7)):
        tree = RecurrentDrafter(head).propose(context, Budget(num_nodes, 3, temperature))
        paths, mass = best_tree(conditionals, ids, num_nodes, temperature)
        assert paths_of(tree) == paths
        assert float(np.exp(tree.scores.astype(np.float64)).sum()) == pytest.approx(mass, rel=1e-4)


def test_a_draft_vocabulary_smaller_than_a_node_s_children_keeps_the_record_finite() -> None:
    model = tiny_model("llama")
    net = Eagle3Net(
        Eagle3Config(64, 64, (0,), VOCAB, 5, 96, num_heads=4, num_kv_heads=2, head_dim=16, mapped=True)
    ).requires_grad_(False)
    target = CachedLM(model, 200)
    drafter = eagle3_drafter(net, target)
    text_of(target, drafter, PENALISED, 8, 30)
    (record,) = drafter.acceptance.to_data().values()
    assert np.isfinite(record["evidence"]).all()
