"""``hcx verify``: run again what can be checked about a ``.hcx`` folder."""

from __future__ import annotations

import time
from typing import Any

from .cmd_rewrite import check_lines
from .opening import check_artefact
from .result import ChecksFailed, Progress, Result, checks_failed, silent


def verify(artefact: str, *, weights: str | None = None, progress: Progress = silent) -> Result:
    """Check file hashes, the recorded outputs (bitwise), and the contracts.

    Args:
        artefact: a ``.hcx`` folder.
        weights: folder of its source model, for one that refers to weights there; owed checks are then run.

    Raises:
        ArtefactError: the folder cannot be read at all.
        ChecksFailed: a check failed; its ``result`` lists all of them.
    """
    check_artefact(artefact)
    progress(f"checking {artefact}")
    from hcx.rewrite.store import verifying

    start = time.perf_counter()
    checks = [c.to_json() for c in verifying.verify(artefact, weights=weights)]
    failed = checks_failed(checks)
    data: dict[str, Any] = {
        "artefact": artefact,
        "holds": not failed,
        "checks": checks,
        "seconds": time.perf_counter() - start,
    }
    lines = [
        artefact,
        *check_lines(checks),
        f"{len(checks) - len(failed)} of {len(checks)} checks hold, {data['seconds']:.1f} s",
    ]
    result = Result(data, "\n".join(lines))
    if failed:
        raise ChecksFailed(
            f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}",
            result,
            where=artefact,
            hint="rewrite the model again with this version of hcx and torch",
        )
    return result
