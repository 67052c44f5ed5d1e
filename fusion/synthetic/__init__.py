"""Built-in data sets that need no network: rendered, or shipped with installed packages."""
