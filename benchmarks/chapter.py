"""Code cells of the book's notebooks, so that what is measured can't differ from what is read."""
from __future__ import annotations

import json
import symtable
from pathlib import Path


def code_that_binds(notebook: Path, name: str) -> str:
    """The first code cell that defines, assigns or imports `name`; raises ValueError if none does."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        bound = {symbol.get_name() for symbol in symtable.symtable(source, notebook.name, "exec").get_symbols()
                 if symbol.is_assigned() or symbol.is_imported()}
        if name in bound:
            return source
    raise ValueError(f"no code cell of {notebook.name} defines {name}, which this measures")
