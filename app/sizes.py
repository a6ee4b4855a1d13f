"""Byte counts as people write them: 8GB is 8 * 10^9, 8GiB is 8 * 2^30."""

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `8GB`, `900 MB`, `1.5GiB` or a plain number; ValueError for anything else, zero and 2^63 or more."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"a size such as 900MB, 8GB or 1.5GiB, not {text!r}")
    num_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= num_bytes < 2**63:
        raise ValueError(f"a size above zero and below 9 million TB, not {text!r}")
    return int(num_bytes)


def format_size(num_bytes: float) -> str:
    """Three significant digits in decimal units: 812 MB, 1.06 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
