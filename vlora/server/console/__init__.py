"""The console: one page that shows what the engine does, and asks it questions."""
