# SPDX-License-Identifier: Apache-2.0
"""Writes the first whole C++ program of a Markdown file to a source file.

    extract_snippet.py README.md OUTPUT.cc

A whole program is a fenced cpp block with a main function.
"""

import re
import sys
from pathlib import Path


def first_program(markdown: Path) -> str:
    text = markdown.read_text()
    for block in re.finditer(r"^```cpp\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        code = block.group(1)
        if re.search(r"^int main\(", code, re.MULTILINE):
            # The compiler then names the lines of the Markdown file in its messages.
            line = text.count("\n", 0, block.start(1)) + 1
            return f'#line {line} "{markdown.name}"\n{code}'
    sys.exit(f"{markdown}: no cpp block with a main function")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(first_program(Path(sys.argv[1])))
