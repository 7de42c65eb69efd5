"""Nested number formats: the first b planes of a weight are a good b-bit weight."""

from dataclasses import fields
from typing import Any

from pagedweight_jax.formats.affine import AffineFormat as AffineFormat
from pagedweight_jax.formats.codebook import CodebookFormat as CodebookFormat
from pagedweight_jax.formats.refined import RefinedFormat as RefinedFormat

Format = AffineFormat | CodebookFormat | RefinedFormat

_FORMATS = {kind.name: kind for kind in (AffineFormat, CodebookFormat, RefinedFormat)}

FORMAT_NAMES = tuple(_FORMATS)


def make_format(name: str, **options: Any) -> Format:
    """Builds a format from its name and options, as a manifest or a flag has them.

    Raises:
      ValueError: if the name is unknown, an option belongs to another format, or a
        value is out of range.
    """
    if name not in _FORMATS:
        raise ValueError(
            f"format {name!r} is unknown; choose one of {', '.join(FORMAT_NAMES)}"
        )
    known = [field.name for field in fields(_FORMATS[name])]
    for option in options:
        if option not in known:
            raise ValueError(
                f"format {name!r} has no option {option!r}; it has {', '.join(known)}"
            )
    return _FORMATS[name](**options)
