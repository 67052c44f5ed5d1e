"""The figures, by paper and subject; each module has `FIGURES`."""
