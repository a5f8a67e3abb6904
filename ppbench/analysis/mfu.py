"""Model FLOPs utilisation: FLOPs that training needs over FLOPs that the devices could do.

    MFU = FLOPs per token × tokens per second / peak FLOP/s of all devices

The numerator is the formula of PaLM (appendix B, arXiv 2204.02311): 6N + 12 L h s FLOPs per token,
forward and backward, with N the parameters that multiply, L layers of attention, h = heads × head
dim and s the sequence length. It counts the FLOPs that the model needs: recomputation does not
count, and attention counts in full although half of it is masked. The formula and the peak are
stored with the figure: MFUs of different formulae or peaks must not be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.model.descriptions import FlopFacts

PALM = "6N+12Lhs (PaLM)"


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one token, forward and backward, and the formula, or why there are none."""

    per_token: float | None
    formula: str


@dataclass(frozen=True)
class Peak:
    """The peak of one device, and its source."""

    flops_per_s: float
    name: str


def model_flops(facts: FlopFacts, seq_len: int | str) -> ModelFlops:
    """FLOPs by PaLM's formula where attention and length are known, else 6N.

    `seq_len` is a case's: a number or "variable".
    """
    number = facts.num_multiplying
    if number is None:
        return ModelFlops(None, facts.note)
    if facts.attentions is None:
        return ModelFlops(6.0 * number, f"6N ({facts.note})")
    if not isinstance(seq_len, int):
        return ModelFlops(6.0 * number, "6N (sequence lengths vary)")
    spans = [seq_len if a.window is None else min(a.window, seq_len) for a in facts.attentions]
    attention = 12.0 * sum(a.width * s for a, s in zip(facts.attentions, spans, strict=True))
    is_cut = min(spans, default=seq_len) < seq_len
    notes = [PALM, "s is a layer's window where that is shorter" if is_cut else "", facts.note]
    return ModelFlops(6.0 * number + attention, "; ".join(note for note in notes if note))


@dataclass(frozen=True)
class _Datasheet:
    """Dense TFLOP/s. float32 without TF32; float64 and bfloat16 on tensor cores where there are."""

    bfloat16: float | None
    float32: float
    float64: float | None = None


_H100 = _Datasheet(989.4, 66.9, 66.9)
_A100 = _Datasheet(312, 19.5, 19.5)
_NVL = _Datasheet(835.5, 60, 60)
_B300 = _Datasheet(2250, 75)  # an eighth of an HGX B300
_MI300X = _Datasheet(1307.4, 163.4, 163.4)

DATASHEETS: Mapping[str, _Datasheet] = {
    # NVIDIA's product datasheets, also "H20" and "H800 Tensor Core GPU"; figures with sparsity are
    # halved.
    "B300": _B300,
    "B300 SXM6 AC": _B300,
    "B200": _Datasheet(2250, 75, 37),
    "GB200": _Datasheet(2500, 80, 40),
    "GH200": _H100,
    "H200": _H100,
    "H200 NVL": _NVL,
    "H100": _H100,  # SXM
    "H100 NVL": _NVL,
    "H20": _Datasheet(148, 44, 1),
    "H800": _Datasheet(989.4, 66.9, 1),  # SXM
    "H800 PCIE": _Datasheet(756, 51.2, 0.8),
    "H100 PCIE": _Datasheet(756, 51.2, 51.2),
    "A100 SXM4": _A100,
    "A100 PCIE": _A100,
    "A40": _Datasheet(149.7, 37.4),
    "A10": _Datasheet(125, 31.2),
    "L40S": _Datasheet(362, 91.6),
    "L40": _Datasheet(181, 90.5),
    "L4": _Datasheet(121, 30.3),
    "T4": _Datasheet(None, 8.1),
    "V100 SXM2": _Datasheet(None, 15.7, 7.8),
    "V100 PCIE": _Datasheet(None, 14, 7),
    "V100S PCIE": _Datasheet(None, 16.4, 8.2),
    "RTX A6000": _Datasheet(154.8, 38.7),
    "RTX 6000 ADA": _Datasheet(364.2, 91.1),
    # AMD's datasheets "Instinct MI250X", "MI300X", "MI325X" and "MI355X Accelerator"; float32 and
    # float64 on matrix cores. A MI250X is two devices, each with half of its figures.
    "INSTINCT MI250X": _Datasheet(191.5, 47.9, 47.9),
    "INSTINCT MI300X": _MI300X,
    "INSTINCT MI325X": _MI300X,
    "INSTINCT MI355X": _Datasheet(2516.6, 157.3, 78.6),
    # Whitepapers of GA102, AD102 and GB202, bfloat16 with float32 accumulation.
    "RTX 3090": _Datasheet(71, 35.6),
    "RTX 4090": _Datasheet(165.2, 82.6),
    "RTX 5090": _Datasheet(209.5, 104.8),
}

_NO_DIFFERENCE = re.compile(r"NVIDIA|AMD|TESLA|GEFORCE|GENERATION|OAM|\d+GB?|HBM3E?")
"""Words of a device's name that do not affect its speed."""


def datasheet_peak(device_name: str, dtype: str) -> Peak | None:
    """The peak of a GPU by its driver's name for it; None if it is not known.

    `dtype` is that of the products: float32, float64 or bfloat16. Names must match as a whole: an
    "A10G", an "RTX 4090 Laptop GPU" and a part of an A100 (MIG) are slower than their namesakes.
    """
    words = re.split(r"[\s-]+", device_name.upper())
    key = " ".join(word for word in words if not _NO_DIFFERENCE.fullmatch(word))
    sheet = DATASHEETS.get(key)
    tflops: float | None = getattr(sheet, dtype, None)
    return None if tflops is None else Peak(tflops * 1e12, f"datasheet {device_name} {dtype}")


def total_peak(peaks: Iterable[tuple[str, Peak]]) -> Peak:
    """The sum over devices; `peaks` has each rank's device, and ranks on one device share it."""
    of_device = dict(peaks)
    names = dict.fromkeys(peak.name for peak in of_device.values())
    return Peak(sum(peak.flops_per_s for peak in of_device.values()), " + ".join(names))


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation, 0..1."""
    return flops_per_token * tokens_per_s / peak_flops_per_s


FIGURES = ("mfu", "mfu_formula", "mfu_peak", "model_flops_per_token", "peak_flops_per_s")


def mfu_figures(
    facts: FlopFacts | None,
    seq_len: int | str,
    tokens_per_s: float,
    peaks: Iterable[tuple[str, Peak]],
    *,
    has_backward: bool = True,
) -> dict[str, float | str | None]:
    """The columns of `FIGURES`; all None without facts (emulated ranks).

    `peaks` has each rank's device and its peak, as `total_peak` takes them. Forwards alone are a
    third of a formula.
    """
    if facts is None:
        return dict.fromkeys(FIGURES)
    flops, peak = model_flops(facts, seq_len), total_peak(peaks)
    if not has_backward and flops.per_token is not None:
        flops = ModelFlops(flops.per_token / 3, f"a third of {flops.formula}: no backward")
    share = None
    if flops.per_token is not None:
        share = mfu(flops.per_token, tokens_per_s, peak.flops_per_s)
    values = (share, flops.formula, peak.name, flops.per_token, peak.flops_per_s)
    return dict(zip(FIGURES, values, strict=True))
