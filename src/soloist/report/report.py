"""`soloist report`: reads a run's folder, writes `report.html` and its pictures.

Guarantees: `report.html` is replaced whole, so a reader of a run that goes on never sees half of it; nothing else in
the folder is touched. Not covered: comparing runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from soloist.errors import UserError
from soloist.report.page import build_page, build_panels
from soloist.report.run_files import find_run, read_run

__all__ = ["find_run", "write_report"]


def write_report(folder: Path) -> Path:
    """Write `report.html` and `report/*.png` into a run's folder; return the page's path.

    Raises UserError when they can't be written. What can't be read is a sentence in the page.
    """
    files = read_run(folder)
    panels = build_panels(files)
    page = build_page(files, panels, time.time())
    pictures = folder / "report"
    target = folder / "report.html"
    try:
        pictures.mkdir(exist_ok=True)
        for panel in panels:
            (pictures / f"{panel.name}.png").write_bytes(panel.png)
        staged = folder / ".report.html"
        # Half of a surrogate pair can't be encoded; `printable` escapes them, this is for names of files.
        staged.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(staged, target)
    except OSError as error:
        raise UserError(
            f"the report can't be written into {folder} ({error}); copy the run to where you may write"
        ) from error
    return target
