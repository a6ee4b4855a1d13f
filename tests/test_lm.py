"""CachedLM against transformers' own forward, path by path."""

import numpy as np
import pytest
import torch
from oracles import random_tree
from tiny import FAMILIES, VOCAB, WINDOW, tiny_model

from offload.overflow import refuse_overflow
from offload.replay import Replays
from specexec.budget import Budget
from specexec.drafters.model import ModelDrafter
from specexec.frames import frame_shape
from specexec.lm import CachedLM, as_ids, score_tree
from specexec.selfcheck import TOLERANCE, tree_attention_error
from specexec.tree import ROOT, TokenTree, empty_tree

LENGTHS = (WINDOW - 3, WINDOW, 3 * WINDOW)


def by_paths(model: torch.nn.Module, context: np.ndarray, tree: TokenTree) -> torch.Tensor:
    """Logits after the context and after each node, each from a forward of its own without cache or mask."""
    rows = []
    for node in range(-1, len(tree)):
        path: list[int] = []
        while node != ROOT:
            path.insert(0, int(tree.tokens[node]))
            node = int(tree.parents[node])
        with torch.inference_mode():
            rows.append(model(input_ids=torch.tensor([[*context.tolist(), *path]]), use_cache=False).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_scores_equal_the_plain_forward_over_several_passes(family: str) -> None:
    model = tiny_model(family)
    for length in LENGTHS:
        lm = CachedLM(model, 200)
        context = as_ids(np.random.default_rng(length).integers(3, VOCAB, length))
        for step in range(3):
            tree = random_tree(12, VOCAB, seed=step)
            torch.testing.assert_close(
                score_tree(lm, context, tree), by_paths(model, context, tree), atol=1e-4, rtol=1e-4
            )
            deep = int(np.argmax(np.cumsum(tree.parents >= 0)))  # some accepted path, then a token of the target's own
            path: list[int] = []
            while deep != ROOT:
                path.insert(0, int(tree.tokens[deep]))
                deep = int(tree.parents[deep])
            context = np.concatenate([context, path, [17]])


def test_growing_a_tree_in_batches_equals_scoring_it_at_once() -> None:
    model = tiny_model("gemma3_text")
    tree, context = random_tree(20, VOCAB), as_ids(range(5, 25))
    lm = CachedLM(model, 100)
    grown = [lm.prefill(context)]
    for begin in range(0, 20, 7):
        grown.append(lm.extend(tree.tokens[begin : begin + 7], tree.parents[begin : begin + 7]))
    torch.testing.assert_close(torch.cat(grown), by_paths(model, context, tree), atol=1e-4, rtol=1e-4)


def test_only_new_tokens_are_computed() -> None:
    model = tiny_model("llama")
    computed: list[int] = []
    model.register_forward_pre_hook(lambda _, __, kw: computed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    lm = CachedLM(model, 100)
    score_tree(lm, as_ids(range(5, 25)), TokenTree(as_ids([7, 8]), as_ids([-1, 0]), np.zeros(2, np.float32)))
    score_tree(lm, as_ids([*range(5, 25), 7, 8, 9]), empty_tree())  # both guesses accepted, one token of its own
    score_tree(lm, as_ids([*range(5, 25), 7, 3]), empty_tree())  # a branch off in the committed text
    lm.prefill(as_ids([*range(5, 25), 7, 3]))  # the same again: the last token's logits are needed
    assert computed == [22, 1, 1, 1]
    assert lm.num_reusable(as_ids([*range(5, 25), 9])) == 20


def test_an_interrupted_pass_leaves_the_next_one_right() -> None:
    model = tiny_model("llama")
    lm, context = CachedLM(model, 100), as_ids(range(5, 25))
    first = score_tree(lm, context, random_tree(8, VOCAB))
    context = as_ids([*range(5, 25), 40])
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        score_tree(lm, context, random_tree(8, VOCAB, seed=1))
    hook.remove()
    tree = random_tree(8, VOCAB, seed=2)
    torch.testing.assert_close(score_tree(lm, context, tree), by_paths(model, context, tree), atol=1e-4, rtol=1e-4)
    assert first.shape == (9, VOCAB)


def test_padding_rows_of_the_vocabulary_are_cut_off() -> None:
    model = tiny_model("llama", vocab_size=384)
    assert score_tree(CachedLM(model, 40, vocab_size=VOCAB), as_ids([5, 6]), empty_tree()).shape == (1, VOCAB)


def test_too_long_a_context_is_an_error_with_numbers() -> None:
    with pytest.raises(ValueError, match="30 tokens of context and 3 of the tree do not fit into the 32 rows"):
        score_tree(CachedLM(tiny_model("llama"), 32), as_ids(range(5, 35)), random_tree(3, VOCAB))


def test_recurrent_layers_are_refused_by_name() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(ValueError, match="linear_attention"):
        CachedLM(model, 10)


def test_the_self_check_passes_everywhere_and_finds_a_mask_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in FAMILIES:
        assert tree_attention_error(CachedLM(tiny_model(family), 40)) < 1e-4, family
    lm = CachedLM(tiny_model("llama"), 40)
    monkeypatch.setattr(lm, "_masks", lambda *_: None)  # as if the library had dropped the argument
    assert tree_attention_error(lm) > TOLERANCE


def test_a_copy_reads_the_original_s_rows() -> None:
    model = tiny_model("qwen3")
    copy = tiny_model("qwen3", seed=3)
    target = CachedLM(model, 60)
    reader = CachedLM(copy, 60, rows_of=target)
    text = as_ids(range(10, 40))
    reader.prefill(text[:12])  # nothing to read yet: rows of its own
    target.prefill(text[:12])
    for length in (13, 20):
        reader.prefill(text[:length])
        own = length - target.num_committed
        for mine, theirs in zip(reader._cache.layers, target._cache.layers, strict=True):
            torch.testing.assert_close(mine.keys[:, :, : length - own], theirs.keys[:, :, : length - own])
        target.prefill(text[:length])
    changed = text.copy()
    changed[5] = 99
    target.prefill(changed[:15])
    expected = reader.prefill(changed[:16])
    fresh = CachedLM(copy, 60, rows_of=target)
    torch.testing.assert_close(fresh.prefill(changed[:16]), expected)


class Recorded:
    """A recorder that runs every pass anew, so that frames are tried where nothing can be recorded."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, shape: tuple[int, int], run):
        self.shapes.append(shape)
        logits = run()
        assert logits.shape == (shape[0], logits.shape[1])
        return logits


def assert_as_close_as_sums_are(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In fp32, whatever the order of the sums."""
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_fixed_shape_give_the_same_logits_and_rows(family: str) -> None:
    model = tiny_model(family)
    plain, framed, recorded = CachedLM(model, 700), CachedLM(model, 700), Recorded()
    framed.record_steps(recorded)
    context = as_ids(np.random.default_rng(1).integers(3, VOCAB, 470))
    for step in range(3):
        tree = random_tree(45, VOCAB, seed=step)
        assert_as_close_as_sums_are(framed.prefill(context), plain.prefill(context))
        for part in (slice(0, 1), slice(1, 8), slice(8, 20), slice(20, 45)):
            found, expected = (lm.extend(tree.tokens[part], tree.parents[part]) for lm in (framed, plain))
            assert_as_close_as_sums_are(found, expected)
            count = plain._cache.num_rows
            assert framed._cache.num_rows == count
            for mine, theirs in zip(framed._cache.layers, plain._cache.layers, strict=True):
                assert_as_close_as_sums_are(mine.keys[:, :, :count], theirs.keys[:, :, :count])
                assert_as_close_as_sums_are(mine.values[:, :, :count], theirs.values[:, :, :count])
        context = np.concatenate([context, tree.tokens[:1], [17]])  # the first node hangs from the root
    assert set(recorded.shapes) == {(8, 512), (32, 512), (32, 700)}


def test_a_copy_that_reads_the_original_s_rows_grows_the_same_trees_in_frames() -> None:
    target, copy, recorded = CachedLM(tiny_model("qwen3"), 120), tiny_model("qwen3", seed=3), Recorded()
    plain, framed = (CachedLM(copy, 120, rows_of=target) for _ in range(2))
    framed.record_steps(recorded)
    drafters = [ModelDrafter(lm) for lm in (plain, framed)]
    context = as_ids(range(10, 40))
    for _ in range(3):
        expected, found = (drafter.propose(context, Budget(24, 8)) for drafter in drafters)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.parents, expected.parents)
        score_tree(target, context, expected)
        context = np.concatenate([context, expected.tokens[:1], [17]])
    assert recorded.shapes


def test_a_step_that_cannot_be_recorded_is_run_plainly_and_not_tried_again() -> None:
    model = tiny_model("gemma3_text")
    plain, framed = CachedLM(model, 100), CachedLM(model, 100)
    tries: list[tuple[int, int]] = []
    framed.record_steps(lambda shape, run: tries.append(shape))
    tree, context = random_tree(12, VOCAB), as_ids(range(5, 25))
    for lm in (plain, framed):
        lm.prefill(context)
    for part in (slice(0, 5), slice(5, 12)):
        found, expected = (lm.extend(tree.tokens[part], tree.parents[part]) for lm in (framed, plain))
        assert torch.equal(found, expected)
    assert tries == [(8, 100)]


def test_a_frame_that_the_cache_has_no_room_for_is_left_out() -> None:
    model, recorded = tiny_model("llama"), Recorded()
    lm = CachedLM(model, 30)
    lm.record_steps(recorded)
    lm.prefill(as_ids(range(5, 25)))
    lm.extend(as_ids([7, 8]), as_ids([-1, 0]))
    lm.extend(as_ids([9]), as_ids([1]))
    lm.extend(as_ids([9]), as_ids([1]))
    assert recorded.shapes == [(8, 30)] * 2
    assert frame_shape(1, 22, 30) == (8, 30) and frame_shape(1, 23, 30) is None and frame_shape(129, 0, 4096) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are recorded nowhere else")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_replayed_steps_on_the_gpu(family: str) -> None:
    model, notes = tiny_model(family).cuda(), []
    plain, replayed = CachedLM(model, 700), CachedLM(model, 700)
    replayed.record_steps(Replays(torch.device("cuda", 0), notes.append))
    context = as_ids(np.random.default_rng(1).integers(3, VOCAB, 470))
    for step in range(3):
        tree = random_tree(45, VOCAB, seed=step)
        for lm in (plain, replayed):
            lm.prefill(context)
        for part in (slice(0, 1), slice(1, 8), slice(8, 20), slice(20, 45)):
            found, expected = (lm.extend(tree.tokens[part], tree.parents[part]) for lm in (replayed, plain))
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert notes == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are recorded nowhere else")
def test_a_recording_that_fails_on_the_gpu_leaves_no_trace() -> None:
    device, notes = torch.device("cuda", 0), []
    replays, before = Replays(device, notes.append), torch.cuda.current_stream(device)
    ones = torch.ones(3, device=device)
    assert replays((8, 8), lambda: ones * ones.sum().item()) is None  # it waits, which no recording may
    assert torch.cuda.current_stream(device) == before
    assert (ones + ones).sum().item() == 6
    assert replays((8, 8), lambda: ones + ones) is None
    assert len(notes) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are recorded nowhere else")
def test_a_float16_draft_is_recorded_though_its_overflow_is_watched() -> None:
    device, notes = torch.device("cuda", 0), []
    model = tiny_model("llama").half().cuda()
    refuse_overflow(model, model.model.layers, "model.layers.", device)
    lm = CachedLM(model, 64)
    lm.record_steps(Replays(device, notes.append))
    lm.prefill(as_ids([5, 6, 7]))
    for _ in range(2):
        lm.extend(as_ids([8]), as_ids([ROOT]))
    assert notes == []
