#!/usr/bin/env python3
"""Print each module of irdmafs with the first sentence of its docstring.

scripts/modules.py [FOLDER]    such as backend/store; all of them by default
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def first_sentence(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]


for folder in sys.argv[1:] or ["irdmafs", "backend"]:
    for module in sorted((ROOT / folder).rglob("*.py")):
        if not module.is_relative_to(ROOT / "irdmafs" / "backend") and "_pb2" not in module.name:
            print(f"{module.relative_to(ROOT)}: {first_sentence(module)}")
