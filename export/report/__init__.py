"""Reports of an evaluation: Markdown, HTML and plots."""
