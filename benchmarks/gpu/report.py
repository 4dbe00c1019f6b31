"""A run as Markdown, which can be pasted into an issue, and as JSON."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.notebooks import Verdict, table
from benchmarks.report import Findings


@dataclass
class Report:
    """What one run found."""

    machine: Machine
    rehearsal: bool
    verdicts: list[Verdict] = field(default_factory=list)
    findings: list[Findings] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a notebook's comparison failed."""
        return any(verdict.failures for verdict in self.verdicts)

    def markdown(self) -> str:
        """Title, machine, notebooks with what failed, then what was measured."""
        parts = [f"## Lockstep on GPUs{': a rehearsal, on gloo and the CPU' if self.rehearsal else ''}",
                 self.machine.measured_on, self.machine.table().markdown(), _fenced(self.machine.links)]
        if self.verdicts:
            parts += [table(self.verdicts).markdown(), *map(_failures, self.verdicts)]
        return "\n\n".join(filter(None, [*parts, *(found.markdown() for found in self.findings)])) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Write report.md and report.json into `folder`; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        markdown, data = folder / "report.md", folder / "report.json"
        markdown.write_text(self.markdown(), "utf-8")
        data.write_text(json.dumps({**asdict(self), "failed": self.failed}, indent=1, ensure_ascii=False), "utf-8")
        return [markdown, data]


def _failures(verdict: Verdict) -> str:
    """What failed in one notebook, with the first lines about each cell; "" if nothing failed."""
    parts = []
    for failure in verdict.failures:
        where = "" if failure.cell is None else f", code cell {failure.cell}"
        parts.append(f"Failed: `{verdict.notebook}`{where}\n\n{_fenced(failure.why)}")
    return "\n\n".join(parts)


def _fenced(lines: str | Sequence[str]) -> str:
    """Lines as they are, in a block that their own fences do not end; "" if there are none."""
    text = lines if isinstance(lines, str) else "\n".join(lines)
    return f"~~~~text\n{text}\n~~~~" if text else ""
