"""Pieces of C++ text from a kernel's configuration."""

from __future__ import annotations

# name of an output's dtype -> its C++ type, and its bytes
OUT_TYPES = {"int32": "int", "int64": "int64_t", "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
OUT_BYTES = {"int32": 4, "int64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def literal(value: object) -> str:
    """``value`` as C++ text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def types(values: dict[str, str]) -> str:
    """Type names of a C++ struct, one for each of ``values``."""
    return "".join(f"  using {name} = {value};\n" for name, value in values.items())


def constants(values: dict[str, object]) -> str:
    """``static constexpr`` members of a C++ struct, one for each of ``values``."""
    return "".join(
        f"  static constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {literal(value)};\n"
        for name, value in values.items()
    )
