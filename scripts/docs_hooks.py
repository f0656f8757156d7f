# SPDX-License-Identifier: Apache-2.0
"""What MkDocs does beyond mkdocs.yml: pages of kernels, links to sources, search from file://."""

import re
from pathlib import Path

# Material loads this from the network, for pages of file://.
_SHIM = "https://unpkg.com/iframe-worker/shim"


def on_config(config):
    """Lists every page of docs/kernels under Kernels."""
    folder = Path(config["docs_dir"]) / "kernels"
    pages = [{page.stem: f"kernels/{page.name}"} for page in sorted(folder.glob("*.md"))]
    for entry in config["nav"]:
        if "Kernels" in entry:
            entry["Kernels"] = pages
    return config


def on_page_markdown(markdown, page, config, files):
    """Links to files outside docs/, which the site does not have, become plain text."""
    docs = Path(config["docs_dir"])

    def kept(link: re.Match) -> str:
        target = (docs / page.file.src_uri).parent / link["target"]
        return link[0] if target.resolve().is_relative_to(docs) else link["text"]

    return re.sub(r"\[(?P<text>[^\]\n]+)\]\((?P<target>\.\./[^)\s]+)\)", kept, markdown)


def on_post_page(output, page, config):
    return _with_own_shim(output, "../" * page.url.count("/"))


def on_post_template(output_content, template_name, config):
    return _with_own_shim(output_content, "/") if template_name == "404.html" else output_content


def _with_own_shim(text: str, root: str) -> str:
    if _SHIM not in text:
        raise RuntimeError(f"Material no longer loads {_SHIM}: change scripts/docs_hooks.py")
    return text.replace(_SHIM, f"{root}assets/file_worker.js")
