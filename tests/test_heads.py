"""Learned drafts from their directories: every kind is recognised, and what does not fit is refused in one line."""

import json
from pathlib import Path

import blocks
import eagles
import mtps
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import VOCAB, save, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from app.heads import head_kind, open_head, read_head
from specexec.budget import Budget
from specexec.drafters.dflash import DFlashDrafter
from specexec.drafters.dspark import DSparkDrafter
from specexec.lm import CachedLM, as_ids

CONTEXT = as_ids(np.random.default_rng(4).integers(3, VOCAB, 9))


def written(directory: Path, config: dict, tensors: dict[str, torch.Tensor], form: str = "safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    parts = [names[::2], names[1::2]] if form.startswith("sharded") else [names]
    for i, part in enumerate(parts, 1):
        number = f"-{i:05}-of-{len(parts):05}" if len(parts) > 1 else ""
        chosen = {name: tensors[name] for name in part}
        if form.endswith("bin"):
            torch.save(chosen, directory / f"pytorch_model{number}.bin")
        else:
            save_file(chosen, directory / f"model{number}.safetensors")
    return directory


def target(layers: int = 6) -> CachedLM:
    return CachedLM(tiny_model("llama", num_hidden_layers=layers), 100)


def proposal(directory: Path, lm: CachedLM) -> list[int]:
    drafter = open_head(directory, lm)
    assert len(drafter.propose(CONTEXT, Budget(8, 6))) == 0, "features that the target does not have yet"
    lm.prefill(CONTEXT[:-1])
    return drafter.propose(CONTEXT, Budget(8, 6)).tokens.tolist()


@pytest.mark.parametrize("name", eagles.LAYOUTS)
def test_eagle3_heads_are_recognised_in_every_layout_and_form_of_storage(name: str, tmp_path: Path) -> None:
    config, tensors, _ = eagles.stored(name)
    found = []
    for form in ("safetensors", "sharded safetensors", "bin", "sharded bin"):
        directory = written(tmp_path / form, config, tensors, form)
        assert head_kind(read_head(directory)) == "eagle3"
        found.append(proposal(directory, target()))
    assert len(found[0]) == 8 and all(each == found[0] for each in found)


@pytest.mark.parametrize("name", mtps.LAYOUTS)
def test_mtp_layers_are_recognised_in_every_layout(name: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "draft", *mtps.Reference(name).stored())
    assert head_kind(read_head(directory)) == "mtp"
    assert len(proposal(directory, target(layers=4))) == 8


def test_mtp_layers_are_read_out_of_the_target_s_own_checkpoint(tmp_path: Path) -> None:
    config, layers = mtps.Reference("glm").stored()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    save(model, tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in layers.items()}, tmp_path / "model-mtp.safetensors")
    assert len(proposal(tmp_path, CachedLM(model, 100))) == 8


@pytest.mark.parametrize(
    ("layout", "head", "drafter"),
    [("z-lab", None, DFlashDrafter), ("SpecForge", "gated", DSparkDrafter), ("speculators", "vanilla", DSparkDrafter)],
)
def test_block_drafts_are_recognised(layout: str, head: str | None, drafter: type, tmp_path: Path) -> None:
    directory = written(tmp_path / "draft", blocks.config_of(layout, head), blocks.tensors_of(layout, head))
    assert isinstance(open_head(directory, target(layers=4)), drafter)
    assert proposal(directory, target(layers=4))


def _without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    config, tensors, _ = eagles.stored("safeailab")
    mtp_config, mtp = mtps.Reference("speculators").stored()
    mtp_config = {**mtp_config, "speculators_model_type": "mtp"}
    extra = {"extra.weight": torch.zeros(3)}
    faults = [
        (config, {**tensors, **extra}, "no place for: extra.weight"),
        (config, _without(tensors, "mlp.down"), "lacks tensors: layers.0.mlp.down_proj.weight"),
        ({**config, "hidden_size": 128}, tensors, "another target: hidden size 128, this one's is 64"),
        ({**config, "vocab_size": 640}, tensors, "another target: vocabulary size 640, this one's is 320"),
        ({**config, "target_layer_ids": [1, 6, 40]}, tensors, r"reads layers \[6, 40\], this one has 6"),
        ({**config, "speculators_model_type": "peagle"}, tensors, "kind 'peagle' are not supported"),
        ({**config, "quantization_config": {"bits": 4}}, tensors, "the draft is quantized"),
        (config, {**tensors, "t2d": ~tensors["t2d"]}, "t2d and d2t of the draft name different tokens"),
        ({}, tensors, "lacks hidden_size"),
        (config, extra, "not those of an EAGLE-3, MTP, DFlash or DSpark draft"),
        (mtp_config, {**mtp, **extra}, "no place for: extra.weight"),
        (mtp_config, _without(mtp, "input_proj"), "lacks tensors: layers.0.fc.weight"),
        ({"speculators_model_type": "mtp"}, mtp, "config.json lacks 'hidden_size'"),
    ]
    for number, (wrong_config, wrong_tensors, message) in enumerate(faults):
        directory = written(tmp_path / str(number), wrong_config, wrong_tensors)
        lm = target(layers=4 if "mtp_layers" in str(list(wrong_tensors)) else 6)
        with pytest.raises(ValueError, match=message) as caught:
            open_head(directory, lm)
        assert str(caught.value).startswith(str(directory)) and "\n" not in str(caught.value)


def test_a_directory_that_is_no_draft_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        open_head(tmp_path, target())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        open_head(tmp_path, target())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"neither \*\.safetensors nor pytorch_model\.bin"):
        open_head(tmp_path, target())
    torch.save({"code": target}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a file of tensors only"):
        open_head(tmp_path, target())
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        open_head(tmp_path, target())
