"""An embedding in main memory: the same logits for every family, ids and rows that cross, and no tied one."""

from dataclasses import replace

import pytest
import tiny
import torch
from oracles import random_tree
from transformers import AutoModelForCausalLM

from offload.checkpoint import open_checkpoint
from offload.gather import embedding_names, gather_on_host, is_tied
from offload.load import load_model, outline
from offload.plan import EMBEDDING, plan
from offload.product import put_weights_first
from offload.quantize import nf4_matrices
from specexec.copies import is_copy
from specexec.device import compute_device
from specexec.lm import CachedLM, as_ids, score_tree

IDS = torch.randint(3, tiny.VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
META = torch.device("meta")


def untied(family, directory, **changes):
    return open_checkpoint(tiny.save(tiny.tiny_model(family, tie_word_embeddings=False, **changes), directory))


def loaded(checkpoint, *, resident=0, tier="disk", dtype=None, **options):
    """The model with its embedding in main memory."""
    parts = outline(checkpoint, dtype=dtype)
    nbytes = sum(parts.rest_bytes[name] for name in embedding_names(parts.model))
    ram_bytes = 10**12 if tier == "ram" else None
    chosen = plan(parts.layers, fixed={}, limit_bytes=10**12, resident=resident, ram_bytes=ram_bytes)
    chosen = replace(chosen, host_items=((EMBEDDING, nbytes), *chosen.host_items))
    return load_model(checkpoint, chosen, dtype=dtype, **options)


@torch.no_grad()
def logits(model, ids=IDS):
    put_weights_first(model)
    return model(ids).logits


def brings_ids_over(module):
    """Whether ids on the meta device are asked for by the CPU, which cannot have them."""
    try:
        module(torch.zeros(1, 2, dtype=torch.long, device=META))
    except RuntimeError as error:
        return "Cannot copy out of meta tensor" in str(error)
    return False


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_are_the_plain_models(family, tmp_path):
    checkpoint = untied(family, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    expected = logits(plain)
    assert not brings_ids_over(plain.get_input_embeddings())
    for resident, tier in ((0, "disk"), (0, "ram"), (2, "disk"), (4, "disk")):
        with loaded(checkpoint, resident=resident, tier=tier) as target:
            assert brings_ids_over(target.model.get_input_embeddings())
            for _ in range(2):
                assert torch.equal(logits(target.model), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_embedding_stored_in_another_type(family, tmp_path):
    checkpoint = untied(family, tmp_path)
    expected = logits(AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16))
    with loaded(checkpoint, dtype=torch.bfloat16) as target:
        assert torch.equal(logits(target.model), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_are_put_out_where_the_model_computes(family):
    module = tiny.tiny_model(family, tie_word_embeddings=False).to(META).get_input_embeddings()
    matrix = torch.randn(module.weight.shape)
    module.weight = torch.nn.Parameter(matrix, requires_grad=False)
    for name, _ in module.named_buffers():
        module.register_buffer(name, torch.tensor(8.0))
    gather_on_host(module, META)
    rows = []
    module.register_forward_hook(lambda _, args, found: rows.append((args[0].device.type, found)))
    module(IDS)
    ((asked, found),) = rows
    assert (asked, found.device, found.shape) == ("cpu", META, (*IDS.shape, 64))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_names_and_ties_are_the_models_own(family):
    model = tiny.tiny_model(family)
    matrix = model.get_input_embeddings().weight
    assert {name for name, each in model.named_parameters() if each is matrix} == embedding_names(model)
    assert is_tied(model.config) == (model.get_output_embeddings().weight is matrix)


def test_a_tied_embedding_is_refused(tmp_path):
    checkpoint = open_checkpoint(tiny.save(tiny.tiny_model("qwen2"), tmp_path))
    with pytest.raises(ValueError, match="the head's matrix is the embedding's") as caught:
        loaded(checkpoint)
    assert "\n" not in str(caught.value)


def test_a_copy_shares_what_is_gathered(tmp_path):
    checkpoint = untied("llama", tmp_path)
    layers = outline(checkpoint).layers
    everything = plan(layers, fixed={}, limit_bytes=10**12, resident=4)
    with loaded(checkpoint) as target:
        draft = load_model(checkpoint, everything, share=target, transform=nf4_matrices)
        embeddings = [each.model.get_input_embeddings() for each in (draft, target)]
        assert embeddings[0].weight.data_ptr() == embeddings[1].weight.data_ptr()
        assert all(map(brings_ids_over, embeddings))
        assert is_copy(draft.model, target.model)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in plain.model.layers.named_parameters():
            parameter.copy_(nf4_matrices(name, parameter))
    assert torch.equal(logits(draft.model), logits(plain))


def test_the_head_tells_where_a_model_computes():
    model = tiny.tiny_model("llama")
    assert compute_device(model) == torch.device("cpu")
    model.lm_head.to(META)
    assert compute_device(model) == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: elsewhere there is one memory only")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
@pytest.mark.parametrize(("resident", "tier"), [(0, "disk"), (2, "ram"), (4, "disk")])
def test_rows_cross_to_the_gpu(family, resident, tier, tmp_path):
    checkpoint, device = untied(family, tmp_path), torch.device("cuda", 0)
    layers = outline(checkpoint).layers
    context, tree = as_ids(range(5, 25)), random_tree(20, tiny.VOCAB)
    found = []
    with load_model(checkpoint, plan(layers, fixed={}, limit_bytes=10**12, resident=4), device=device) as whole:
        found.append(score_tree(CachedLM(whole.model, 64), context, tree))
    with loaded(checkpoint, resident=resident, tier=tier, device=device) as target:
        embedding = target.model.get_input_embeddings()
        assert {each.device.type for each in (*embedding.parameters(), *embedding.buffers())} == {"cpu"}
        lm = CachedLM(target.model, 64)
        assert lm.device == device
        found.append(score_tree(lm, context, tree))
        assert embedding(torch.tensor([[5]], device=device)).device == device
    assert torch.equal(*found)
