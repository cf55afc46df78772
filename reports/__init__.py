"""What a user sees of a result: terminal table, Markdown, HTML."""
