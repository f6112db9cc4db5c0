"""What a results file says about the machine that made it."""

from __future__ import annotations

from datetime import UTC, datetime

from magicube_cutlass.cli.environment import environment


def machine() -> dict[str, str]:
    """Versions, processor, engine path and date."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), **environment()}
