"""The description on a package index: README.md without pictures and links to files, which are not there."""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"^!\[[^\]]*\]\((?!https:)[^)]+\)\n\n", "", text, flags=re.MULTILINE)
text = re.sub(r"\[([^\]]+)\]\((?!https:)[^)\s]+\)", r"\1", text)
setup(long_description=text, long_description_content_type="text/markdown")
