"""The report of an incident, as JSON for programs and as Markdown for people."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfx.recipe.verdict import Evidence, Verdict

SHOWN = 12


def write_report(folder: Path, evidence: Evidence, verdict: Verdict, action: str) -> Path:
    """Write ``step-N.json`` and ``step-N.md``; a further incident of the step gets a further name."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"step-{evidence.step:08d}"
    count = len(list(folder.glob(f"{stem}*.md")))
    path = folder / f"{stem}{f'-{count + 1}' if count else ''}.md"
    record = dataclasses.asdict(evidence) | {
        "verdict": dataclasses.asdict(verdict), "action": action
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(_finite(record), indent=2, default=str) + "\n")
    path.write_text(markdown(evidence, verdict, action))
    return path


def markdown(evidence: Evidence, verdict: Verdict, action: str) -> str:
    """Lay an incident out for reading."""
    e = evidence
    bits = {True: "the same bits", False: "**other bits**", None: "not tried"}[e.same_bits]
    if e.same_bits is False and not e.deterministic:
        bits += ", which says little: torch.use_deterministic_algorithms is off"
    lines = [
        f"# Step {e.step}: {verdict.cause}",
        "",
        *_list(verdict.reasons),
        "",
        f"Action: {action}.",
        "",
        "## Alarms",
        *_list(e.alarms),
        "",
        f"## Batch {e.data_step}",
        *_list(e.oddities or ["nothing odd"]),
        *([f"- samples: {_short(e.batch_ids)}"] if e.batch_ids is not None else []),
        "",
        "## Step",
        f"- learning rate: {_number(e.lr)}",
        f"- computed in: {e.precision or 'the dtype of the model'}",
        f"- loss scale: {_number(e.loss_scale)}",
        f"- gradients in that dtype, the highest share of any leaf: {_shares(e.ranges)}",
        f"- gradient norm of this batch: {_number(e.grad_norm)}; of a usual one: "
        f"{_number(e.usual_norm)} (same parameters)",
        "",
        "## State",
        f"- repeated{' ' + e.replayed if e.replayed else ''}: {bits}",
        *_list(e.disagreeing[:SHOWN] or ["all copies agree"]),
        *_list([f"not finite before: {text}" for text in e.nonfinite_before[:SHOWN]]),
        *_list([f"not finite after: {text}" for text in e.nonfinite[:SHOWN]]),
        *_list([f"second moment below zero: {text}" for text in e.broken_moments[:SHOWN]]),
        "",
    ]
    if e.layers:
        lines += [
            "## Gradient norms",
            "",
            "| parameter | this batch | a usual one |",
            "|---|---|---|",
        ]
        lines += [
            f"| `{name}` | " + " | ".join(f"{x:.4g}" for x in row) + " |"
            for name, row in e.layers.items()
        ]
        lines.append("")
    if e.history:
        lines += ["## Steps before", "", "| loss | gradient norm | lr |", "|---|---|---|"]
        lines += [
            "| " + " | ".join(_number(x.get(name)) for name in ("loss", "grad_norm", "lr")) + " |"
            for x in e.history[-SHOWN:]
        ]
        lines.append("")
    return "\n".join(lines)


def _list(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _number(x: float | None) -> str:
    return "none" if x is None else f"{x:.6g}"


def _shares(ranges: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.2%} {kind}" for kind, share in ranges.items()) or "not looked at"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]}... (all in the JSON file)"


def _finite(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become text."""
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
