"""What users of scipy and torch expect of a matrix: ``@``, ``.T``, slices, copies, comparison, conversions, masks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import magicube_cutlass as mc
from magicube_cutlass.formats.array_methods import TransposedMatrix
from magicube_cutlass.formats.fill_in import mask_pattern


def weight(m: int = 45, k: int = 64, v: int = 8, seed: int = 0) -> torch.Tensor:
    values = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    return values * mc.prune(values, 0.7, v)


KINDS = [
    *({"bits": bits, "scale": scale} for bits in (4, 8, 16) for scale in ("tensor", "row")),
    *({"dtype": dtype} for dtype in ("float16", "bfloat16", "e4m3", "e2m1")),
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_product_of_floats_is_that_of_quantized_floats(options: dict[str, str]) -> None:
    a, x = mc.SRBCRS.from_dense(weight(), vector_length=8, **options), torch.randn(64, 5)  # type: ignore[arg-type]
    found = a @ x
    assert found.shape == (45, 5) and found.dtype == x.dtype
    exact = a.to_dense().double() @ x.double()
    assert (found - exact).norm() <= (0.05 if options.get("dtype") in ("e4m3", "e2m1") else 0.01) * exact.norm()
    assert torch.allclose(a @ x[:, 0], (a @ x[:, :1])[:, 0])
    if options.get("bits") == 8:
        assert torch.equal(found, mc.spmm(a, mc.quantize(x, 8, "column")))
    if options.get("bits") == 16:
        assert (found - exact).norm() <= 1e-4 * exact.norm()
    assert (a @ x.half()).dtype == torch.float16 and (a @ x.double()).dtype == torch.float64


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 16}, {"dtype": "float16"}, {"dtype": "e4m3"}], ids=str)
def test_a_transpose_multiplies(options: dict[str, str]) -> None:
    a, x = mc.SRBCRS.from_dense(weight(), vector_length=8, **options), torch.randn(3, 45, 5)  # type: ignore[arg-type]
    exact = a.to_dense().double().mT @ x.double()
    assert isinstance(a.T, TransposedMatrix) and a.T.T is a and a.T.shape == (64, 45)
    assert torch.equal(a.T.to_dense(), a.to_dense().mT)
    assert ((a.T @ x) - exact).norm() <= (0.05 if options.get("dtype") == "e4m3" else 0.01) * exact.norm()
    assert (a.T @ x[0, :, 0]).shape == (64,)


def test_integers_are_taken_as_they_are() -> None:
    ints = torch.randint(-128, 128, (45, 64), dtype=torch.int8)
    a, x = mc.SRBCRS.from_dense(ints, vector_length=8), torch.randint(-128, 128, (64, 5), dtype=torch.int8)
    assert torch.equal(a @ x, (ints.long() @ x.long()).int())
    wide = mc.SRBCRS.from_dense(torch.full((8, 64), -(2**15)), vector_length=8, bits=16)
    found = wide @ torch.full((64, 1), -(2**15), dtype=torch.int16)
    assert found.dtype == torch.int64 and int(found[0, 0]) == 64 * 2**30
    with pytest.raises(TypeError, match=r"x must be float, or one of int8, uint8, int16, uint16, got torch\.int64"):
        a @ x.long()
    with pytest.raises(TypeError, match="x must be a Tensor, QuantTensor or ScaledFloatTensor, got ndarray"):
        a @ x.numpy()


def test_a_product_of_floats_has_a_gradient() -> None:
    a, x = mc.SRBCRS.from_dense(weight(), vector_length=8), torch.randn(64, 5, requires_grad=True)
    (a @ x).sum().backward()
    assert x.grad is not None
    wanted = a.to_dense().mT @ torch.ones(45, 5)
    assert (x.grad - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@settings(max_examples=60)
@given(
    m=st.integers(1, 50), k=st.integers(1, 40), v=st.sampled_from([1, 2, 4, 8, 32]), start=st.integers(-60, 60),
    stop=st.integers(-60, 60), bits=st.sampled_from([4, 8, 16]), scale=st.sampled_from(["tensor", "row"]),
    plain=st.booleans(),
)  # fmt: skip
def test_rows_are_those_of_the_dense_matrix(m, k, v, start, stop, bits, scale, plain) -> None:  # type: ignore[no-untyped-def]
    kind = mc.BCRS if plain else mc.SRBCRS
    a = kind.from_dense(weight(m, k, v, seed=m), vector_length=v, bits=bits, scale=scale)
    part = a[start:stop]
    part.check_format(full=True)
    assert torch.equal(part.to_dense(), a.to_dense()[start:stop]) and type(part) is kind
    if range(m)[start:stop] and range(m)[start:stop][0] % v == 0:
        assert part.pattern.vectors <= a.pattern.vectors


@pytest.mark.parametrize("dtype", ["float16", "e5m2", "e2m1"])
def test_rows_of_floats(dtype: str) -> None:
    a = mc.SRBCRS.from_dense(weight(), vector_length=8, dtype=dtype)
    for part, rows in ((a[8:24], slice(8, 24)), (a[3:40], slice(3, 40)), (a[:0], slice(0, 0))):
        part.check_format(full=True)
        assert torch.equal(part.to_dense().float(), a.to_dense().float()[rows]) and part.packed == a.packed


def test_other_indices_are_refused() -> None:
    a = mc.SRBCRS.from_dense(weight(), vector_length=8)
    with pytest.raises(TypeError, match="rows must be a slice"):
        a[3]  # type: ignore[index]
    with pytest.raises(ValueError, match="rows must have step 1, got 2"):
        a[::2]
    batch = mc.sddmm(*(mc.quantize(torch.randn(2, n, 16), 8, "row") for n in (45, 64)), a.pattern)
    with pytest.raises(ValueError, match=r"needs a single matrix, got a batch of \(2,\)"):
        batch[:8]


@pytest.mark.parametrize("kind", [mc.SRBCRS, mc.BCRS])
def test_clones_are_equal_and_share_nothing(kind: type[mc.SRBCRS] | type[mc.BCRS]) -> None:
    a = kind.from_dense(weight(), vector_length=8, scale="row")
    copy = a.clone()
    assert copy.equals(a) and a.equals(copy) and a.cpu() is a
    mine, theirs = a._tensors(), copy._tensors()
    assert not {each.data_ptr() for each in mine.values()} & {each.data_ptr() for each in theirs.values()}
    copy.values[(0,) * copy.values.ndim] += 1
    assert not copy.equals(a) and not a.equals(a.values) and not a.equals(a[:8])
    assert not a.equals(kind.from_dense(weight(), vector_length=8))
    with pytest.raises((RuntimeError, AssertionError)):
        if torch.cuda.is_available():
            raise RuntimeError("there is a GPU")
        a.cuda()


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_torch_sparse_round_trips(options: dict[str, str]) -> None:
    a = mc.SRBCRS.from_dense(weight(), vector_length=8, **options)  # type: ignore[arg-type]
    found = a.to_torch_sparse()
    assert found.layout == torch.sparse_csr and found.values().numel() == a.nnz
    assert torch.equal(found.to_dense().float(), a.to_dense().float())
    plain = a.to_torch_sparse(dequantize=False)
    if options.get("bits") == 8:
        again = mc.SRBCRS.from_torch_sparse(plain, vector_length=8)
        assert torch.equal(again.to_dense(), a.to_dense(dequantize=False))


def test_fill_in_of_an_input_without_vectors_is_told() -> None:
    rng = np.random.default_rng(0)
    matrix = scipy.sparse.random_array((256, 256), density=0.1, rng=rng, format="csr")
    with pytest.warns(
        UserWarning, match=r"vectors of 8 fill in zeros: a density of 0\.1 becomes 0\.5\d*; vector_length="
    ):
        a = mc.SRBCRS.from_scipy(matrix, vector_length=8)
    assert a.density > 0.5
    with pytest.warns(UserWarning, match="vector_length=1 stores 0.1 and the fewest bytes") as told:
        mc.SRBCRS.from_torch_sparse(torch.from_numpy(matrix.toarray()).to_sparse(), vector_length=8, bits=16)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mc.SRBCRS.from_scipy(matrix, vector_length=1)
        mc.SRBCRS.from_scipy(scipy.sparse.csr_array(weight().numpy()), vector_length=8)
        mc.SRBCRS.from_scipy(scipy.sparse.csr_array((8, 8)), vector_length=8)


@pytest.mark.parametrize("v", [1, 2, 4, 8])
def test_masks_of_scipy_and_bool_are_sampled_exactly(v: int) -> None:
    mask = mc.random_pattern(40, 30, 0.7, v).to_dense()
    x, y = (mc.quantize(torch.randn(n, 16), 8, "row") for n in (40, 30))
    wanted = torch.where(mask, x.dequantize() @ y.dequantize().mT, 0.0)
    for given_mask in (mask, scipy.sparse.csr_array(mask.numpy()), scipy.sparse.coo_matrix(mask.numpy())):
        found = mc.sddmm(x, y, given_mask)
        assert found.vector_length == v and found.nnz == int(mask.sum())
        assert torch.allclose(found.to_dense(), wanted, atol=1e-5)


def test_other_masks_are_refused() -> None:
    x = mc.quantize(torch.randn(8, 16), 8, "row")
    with pytest.raises(TypeError, match=r"mask must be bool, got a tensor of torch\.float32; use mask != 0"):
        mc.sddmm(x, x, torch.ones(8, 8))
    with pytest.raises(ValueError, match="mask must have 2 dimensions, got 3"):
        mc.sddmm(x, x, torch.ones(1, 8, 8, dtype=torch.bool))
    with pytest.raises(
        TypeError, match=r"mask must be a Pattern, SRBCRS, BCRS, bool tensor or scipy\.sparse matrix, got str"
    ):
        mc.sddmm(x, x, "mask")
    assert mask_pattern(np.ones((8, 8))) is None


def test_axis_warns_and_means_what_it_meant() -> None:
    x = weight()
    for axis, scale in ((None, "tensor"), (1, "row"), (0, "column")):
        wanted = mc.quantize(x, 8, scale)  # type: ignore[call-overload]
        with pytest.warns(DeprecationWarning, match=f"axis={axis} is deprecated; use scale='{scale}'") as told:
            found = mc.quantize(x, 8, axis=axis)
        assert told[0].filename == __file__
        assert torch.equal(found.scale, wanted.scale) and found.axis == wanted.axis  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="axis=0 is deprecated"):
        assert mc.quantize(x, 8, 0).axis == 0  # type: ignore[call-overload]
    for kind in (mc.SRBCRS, mc.BCRS):
        with pytest.warns(DeprecationWarning, match="axis=1 is deprecated; use scale='row'"):
            old = kind.from_dense(x, vector_length=8, axis=1)
        assert old.equals(kind.from_dense(x, vector_length=8, scale="row"))
        with pytest.raises(ValueError, match="scale must be 'tensor' or 'row', got 'column'"):
            kind.from_dense(x, vector_length=8, scale="column")
    with pytest.raises(ValueError, match="scale must be 'tensor', 'row' or 'column', got 'rows'"):
        mc.quantize(x, 8, "rows")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="without axis, got scale='row', axis=0"):
        mc.quantize(x, 8, "row", axis=0)
    with pytest.raises(ValueError, match="without axis, got scale=None, axis=2"):
        mc.quantize(x, 8, axis=2)


def test_floats_take_the_names_of_scales() -> None:
    a, b = torch.randn(16, 64), torch.randn(64, 8)
    for dtype in ("e4m3", "mxfp8", "mxfp4"):
        left, right = mc.quantize(a, dtype=dtype, scale="row"), mc.quantize(b, dtype=dtype, scale="column")
        exact = left.dequantize().double() @ right.dequantize().double()
        assert (mc.matmul(left, right) - exact).norm() <= 1e-5 * exact.norm()
    with pytest.raises(
        ValueError, match="a must be quantized with scale='row', along the k of the product, got 'column'"
    ):
        mc.matmul(mc.quantize(a, dtype="mxfp8", scale="column"), mc.quantize(b, dtype="mxfp8", scale="column"))
