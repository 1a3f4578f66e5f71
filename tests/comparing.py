"""How far a captured tensor is from the right one."""

import torch
from torch import Tensor

WHOLE, ROW = 1e-5, 1e-4
"""What a float32 tensor may be off by: of its largest number, and in each row of that row's largest number."""


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The largest error over the tensor's largest number, and over each row's own.

    A masked score is minus infinity in `want` and any number too low to matter in `got`; integers count as they are.
    """
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    got, want = got.double(), want.double()
    masked = want == float("-inf")
    if bool(masked.any()):
        assert bool((got[masked] < -1e30).all()), "a masked score is one that counts"
        got, want = (torch.where(masked, 0.0, t) for t in (got, want))
    off = (got - want).abs()
    largest = want.abs().amax(-1, keepdim=True)
    whole = off.max() / largest.max().clamp_min(1e-30)
    row = (off / largest.clamp_min(1e-4 * largest.max()).clamp_min(1e-30)).max()
    return float(whole.nan_to_num(torch.inf)), float(row.nan_to_num(torch.inf))


def assert_close(got: Tensor, want: Tensor, what: object = "", whole: float = WHOLE, row: float = ROW) -> None:
    """Fail unless `got` is `want` up to rounding; `what` is the address it was captured at."""
    of_all, of_row = errors(got, want)
    assert of_all <= whole, f"{what}: off by {of_all:.1e} of its largest number"
    # a row of scores may be one score, which may cancel to almost nothing and keep the rounding of its terms
    if not str(what).startswith("attn_scores"):
        assert of_row <= row, f"{what}: off by {of_row:.1e} of a row's largest number"
