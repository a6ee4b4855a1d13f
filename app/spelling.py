"""The name that someone who wrote another one probably meant."""

from collections.abc import Collection
from difflib import get_close_matches


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """An ending for an error line: `; did you mean X?`, or the known names where none is near."""
    if close := get_close_matches(name, known, n=1, cutoff=0.5):
        return f"; did you mean {prefix}{close[0]}?"
    return f"; known are {', '.join(prefix + each for each in sorted(known))}"
