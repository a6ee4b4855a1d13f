"""What a weight becomes in four or eight bits, against oracles in plain torch."""

import pytest
import torch

from offload.quantize import Int8, Nf4, plain_nf4

SHAPES = [(64, 64), (3, 6), (2, 32, 48), (7, 130), (4, 96), (1100, 1024)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight_of(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def decode(encoding, parts, shape, dtype):
    payload, *scales = parts.values()
    values = torch.empty(shape, dtype=dtype)
    encoding.decode(payload.flatten(), scales, values)
    return values


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("encoding", [Nf4(), Nf4(double_quant=False), Nf4(128), Int8()], ids=str)
def test_stored_as_announced(shape, encoding):
    parts = encoding.encode(weight_of(shape))
    assert {ending: (part.dtype, tuple(part.shape)) for ending, part in parts.items()} == encoding.layout(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_against_plain_torch(shape, dtype):
    weight = weight_of(shape, dtype)
    encoding = Nf4(double_quant=False)
    parts = encoding.encode(weight)
    found = decode(encoding, parts, shape, dtype)
    expected = plain_nf4(parts[""], parts[".absmax"], shape, dtype=dtype)
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    assert torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-6)
    widest_gap = 0.16 * weight.float().abs().max()  # half of the widest gap between two levels, and rounding
    assert (found.float() - weight.float()).abs().max() < widest_gap


def test_double_quantization_moves_scales_little():
    weight = weight_of((512, 1024))
    once, twice = (decode(e, e.encode(weight), (512, 1024), torch.float32) for e in (Nf4(double_quant=False), Nf4()))
    assert (once - twice).norm() < 0.02 * once.norm()
    assert (twice - weight).norm() < 0.11 * weight.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_rounded_once(shape, dtype):
    weight = weight_of(shape, dtype)
    weight.view(-1, shape[-1])[0] = 0
    parts = Int8().encode(weight)
    exact = parts[""].float() * parts[".scale"][..., None]
    assert torch.equal(decode(Int8(), parts, shape, dtype), exact.to(dtype))
    assert bool(((exact - weight.float()).abs() <= parts[".scale"][..., None] * 0.501).all())


def test_bits_per_value():
    for encoding, bits in (
        (Nf4(), 4 + 8 / 64 + 32 / 64 / 256),
        (Nf4(double_quant=False), 4.5),
        (Int8(), 8 + 32 / 4096),
    ):
        stored = encoding.layout((4096, 4096)).values()
        num_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in stored)
        assert num_bytes * 8 / 4096**2 == pytest.approx(bits, rel=1e-4)
