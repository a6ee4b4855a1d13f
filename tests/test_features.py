"""Features of context and accepted nodes equal the library's own hidden states, whatever was guessed in between."""

import numpy as np
import pytest
import torch
from oracles import random_tree
from tiny import VOCAB, attention_of, save, tiny_model

from offload.checkpoint import open_checkpoint
from offload.load import load_model, outline
from offload.plan import plan
from specexec.features import EMBEDDING
from specexec.lm import CachedLM, as_ids, score_tree
from specexec.tree import ROOT, empty_tree

LAYERS = (2, EMBEDDING, 0)
CONTEXT = as_ids(np.random.default_rng(3).integers(3, VOCAB, 13))


def features(model: torch.nn.Module, context: np.ndarray) -> torch.Tensor:
    """What the tap should hold, from a plain forward over the text before the root."""
    with torch.inference_mode():
        states = model(
            input_ids=torch.from_numpy(context[:-1])[None], use_cache=False, output_hidden_states=True
        ).hidden_states
    return torch.cat([states[layer + 1][0] for layer in LAYERS] + [states[-1][0]], dim=-1)


def random_steps(lm: CachedLM, context: np.ndarray, count: int):
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


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt_oss"])
def test_features_are_the_library_s_hidden_states(family: str) -> None:
    model = tiny_model(family)
    lm = CachedLM(model, 120)
    tap = lm.tap(LAYERS, final_norm=True)
    assert tap.width == 4 * 64
    for context in random_steps(lm, CONTEXT, 6):
        torch.testing.assert_close(tap.rows(context), features(model, context), atol=1e-4, rtol=1e-4)
    assert lm.num_computed < len(context) + 6, "features cost no pass of their own"


def test_features_of_a_streamed_model(tmp_path) -> None:
    model = tiny_model("gemma3_text")
    checkpoint = open_checkpoint(save(model, tmp_path))
    layers = outline(checkpoint, attn_implementation=attention_of(model.config)).layers
    with load_model(checkpoint, plan(layers, fixed={}, limit_bytes=2**40, resident=1)) as loaded:
        assert loaded.streamer is not None
        lm = CachedLM(loaded.model, 120)
        tap = lm.tap(LAYERS, final_norm=True)
        for context in random_steps(lm, CONTEXT, 4):
            torch.testing.assert_close(tap.rows(context), features(model, context), atol=1e-4, rtol=1e-4)


def test_there_are_none_before_the_target_has_computed_them() -> None:
    lm = CachedLM(tiny_model("llama"), 60)
    lm.prefill(CONTEXT)
    tap = lm.tap([1])
    assert tap.rows(CONTEXT) is None, "computed before anybody listened"
    lm.prefill(CONTEXT)
    assert tap.rows(as_ids([*CONTEXT, 5, 6, 7])) is None
    assert tap.rows(as_ids([*CONTEXT, 5])).shape == (len(CONTEXT), 64)
    assert tap.rows(CONTEXT).shape == (len(CONTEXT) - 1, 64)
    assert tap.rows(CONTEXT[:1]) is None


def num_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_another_text_and_an_interrupted_pass_leave_the_features_right() -> None:
    model = tiny_model("llama")
    lm = CachedLM(model, 100)
    tap = lm.tap(LAYERS, final_norm=True)
    score_tree(lm, CONTEXT, random_tree(8, VOCAB))
    features(model, CONTEXT)  # the library hangs hooks of its own on a model that is asked for hidden states
    before = num_hooks(model)
    context = as_ids([*CONTEXT[:9], 40, 41, 42])
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        score_tree(lm, context, empty_tree())
    hook.remove()
    assert tap.rows(context) is None
    torch.testing.assert_close(tap.rows(context[:10]), features(model, context[:10]), atol=1e-4, rtol=1e-4)
    score_tree(lm, context, empty_tree())
    torch.testing.assert_close(tap.rows(context), features(model, context), atol=1e-4, rtol=1e-4)
    assert num_hooks(model) == before, "listening ended with each pass"


def test_layers_that_do_not_exist_are_refused() -> None:
    lm = CachedLM(tiny_model("llama"), 60)
    for wrong in ([4], [0, -2]):
        with pytest.raises(ValueError, match=r"layers 0 to 3 \(and -1, its embedding\)"):
            lm.tap(wrong)
    with pytest.raises(ValueError, match="at least one layer"):
        lm.tap([])
    with pytest.raises(ValueError, match="tap that model"):
        CachedLM(tiny_model("llama"), 60, rows_of=lm).tap([0])
