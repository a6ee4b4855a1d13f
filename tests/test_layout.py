"""Stored bytes to parameters: names, extents, views, casts and fused experts."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from offload.checkpoint import TensorEntry, open_checkpoint
from offload.layout import BLOCK_BYTES, Unit, _extents, _slot_offsets, assign_slots, typed
from offload.load import outline
from offload.names import Recipe


def unit(signature, nbytes):
    return replace(_EMPTY, signature=signature, extents=_extents([entry(0, nbytes)]))


def entry(offset, nbytes, file="a"):
    return TensorEntry(f"{file}{offset}", file, offset, nbytes, torch.uint8, (nbytes,))


_EMPTY = Unit("unit", (), (), frozenset(), 0, 0, ())


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60_000), st.integers(1, 9_000)), min_size=1, max_size=9)
)
def test_extents_cover_every_tensor_once(places):
    entries = [entry(offset, nbytes, file) for file, offset, nbytes in {place[:2]: place for place in places}.values()]
    extents = _extents(entries)
    blocks = [(e.file, b) for e in extents for b in range(e.offset, e.offset + e.nbytes, BLOCK_BYTES)]
    assert len(set(blocks)) == len(blocks)
    assert all(n % BLOCK_BYTES == 0 for e in extents for n in (e.offset, e.nbytes, e.slot_offset))
    assert [e.slot_offset for e in extents] == [sum(e.nbytes for e in extents[:i]) for i in range(len(extents))]
    whole = replace(_EMPTY, recipes=tuple(Recipe((e.name,), (e,)) for e in entries), extents=extents)
    for e in entries:
        place = _slot_offsets(whole)[e.name]
        home = next(x for x in extents if x.slot_offset <= place < x.slot_offset + x.nbytes)
        assert home.offset + place - home.slot_offset == e.offset
        assert place + e.nbytes <= home.slot_offset + home.nbytes


def test_a_fat_unit_does_not_set_the_size_of_every_slot():
    units = [unit("fat", 50_000), unit("thin", 5_000), unit("thin", 9_000), unit("thin", 4_000)]
    slots = assign_slots(units, 2)
    assert slots.slot_of == (0, 1, 2, 1)
    assert slots.slot_bytes == (53_248, 8_192, 12_288)


def test_unaligned_bytes_are_copied():
    stored = torch.arange(3, dtype=torch.float32)
    raw = torch.cat([torch.zeros(1, dtype=torch.uint8), stored.view(torch.uint8)])[1:]
    assert torch.equal(typed(raw, TensorEntry("x", "a", 1, 12, torch.float32, (3,))), stored)


def test_views_where_types_agree_and_workspace_where_not(tmp_path):
    checkpoint = open_checkpoint(tiny.save(tiny.tiny_model("llama").bfloat16(), tmp_path))
    same = outline(checkpoint).layers[0]
    assert len(same.direct) == 9
    assert same.workspace_bytes == 0
    assert same.resident_bytes == same.slot_bytes
    wider = outline(checkpoint, dtype=torch.float32).layers[0]
    assert not wider.direct
    assert len(wider.packed) == 7
    assert wider.slot_bytes == same.slot_bytes
    assert wider.workspace_bytes == 2 * 64 * 4  # the norms
    assert wider.resident_bytes == wider.slot_bytes + wider.workspace_bytes  # matrices are widened one at a time
    widened = tiny.save(tiny.tiny_model("llama"), tmp_path / "wide")
    narrower = outline(open_checkpoint(widened), dtype=torch.bfloat16).layers[0]
    assert not narrower.direct | narrower.packed
    assert narrower.resident_bytes == narrower.workspace_bytes < 0.6 * narrower.slot_bytes


def test_rest_is_one_unit_for_each_parameter(tmp_path):
    parts = outline(open_checkpoint(tiny.save(tiny.tiny_model("llama"), tmp_path)))
    assert set(parts.rest_bytes) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert [layer.name for layer in parts.layers] == [f"model.layers.{i}" for i in range(4)]


def changed(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(directory)


def test_missing_parameter_is_named(tmp_path):
    directory = tiny.save(tiny.tiny_model("llama"), tmp_path)
    checkpoint = changed(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        outline(checkpoint)


def test_missing_head_of_an_untied_model_is_named(tmp_path):
    directory = tiny.save(tiny.tiny_model("llama"), tmp_path)
    checkpoint = changed(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        outline(checkpoint)


def test_unexpected_tensor_is_named(tmp_path):
    directory = tiny.save(tiny.tiny_model("llama"), tmp_path)
    checkpoint = changed(directory, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"holds model\.extra\.weight"):
        outline(checkpoint)


def test_tensors_that_transformers_ignores_are_ignored(tmp_path):
    directory = tiny.save(tiny.tiny_model("llama"), tmp_path)
    extra = {
        "model.layers.4.eh_proj.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    parts = outline(changed(directory, lambda tensors: tensors.update(extra)))
    assert len(parts.layers[0].recipes) == 9


def test_wrong_shape_is_named(tmp_path):
    directory = tiny.save(tiny.tiny_model("llama"), tmp_path)
    checkpoint = changed(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[64\]"):
        outline(checkpoint)


def test_missing_expert_is_named(tmp_path):
    directory = tiny.save(tiny.tiny_model("mixtral"), tmp_path)
    gone = "model.layers.2.block_sparse_moe.experts.3.w1.weight"
    checkpoint = changed(directory, lambda tensors: tensors.pop(gone))
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.gate_up_proj"):
        outline(checkpoint)
